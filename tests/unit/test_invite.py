"""The invite: comes through any chat or mail, or says that it did not."""

from __future__ import annotations

import base64
import textwrap

import msgpack
import pytest
from blake3 import blake3

from collab_core.errors import Code, CollabError, ConfigError
from collab_core.run import Invite, looks_like_invite

PEER = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWHHzSeKaY8xuZVzkLbKFfvNgPPeKhFBGrMbNzbm5akpqu"
QUIC = "/dns4/aux.example.org/udp/31337/quic/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
RUN_HASH = blake3(b"run").digest()
MARK = blake3(b"key").digest()[:16]
INVITE = Invite(run_hash=RUN_HASH, fingerprint=MARK, initial_peers=(PEER, QUIC), name="my-run")
TEXT = INVITE.encode()


def encoded(fields: object) -> str:
    packed = msgpack.packb(fields)
    return "collab1_" + base64.urlsafe_b64encode(packed + blake3(packed).digest()[:4]).decode().rstrip("=")


def refusal(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Invite.decode(text)
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    "invite",
    [
        INVITE,
        Invite(run_hash=RUN_HASH, fingerprint=MARK, initial_peers=(PEER,)),
        Invite(run_hash=bytes(32), fingerprint=bytes(16), initial_peers=(PEER,) * 16, name="x" * 48),
        Invite(run_hash=RUN_HASH, fingerprint=MARK, initial_peers=("/dns4/" + "a" * 244 + "/p2p/Q",) * 16, name="x"),
    ],
)
def test_an_invite_comes_back_as_it_was(invite: Invite) -> None:
    assert Invite.decode(invite.encode()) == invite


def test_an_invite_is_one_word_of_safe_characters() -> None:
    assert TEXT.startswith("collab1_")
    assert set(TEXT) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def wrapped(width: int, lead: str = "", end: str = "\n") -> str:
    return end.join(lead + line for line in textwrap.wrap(TEXT, width, break_on_hyphens=False))


PASTED = {
    "plain": TEXT,
    "spaces around": f"  \t{TEXT}\n\n",
    "straight quotes": f'"{TEXT}"',
    "apostrophes": f"'{TEXT}'",
    "code": f"`{TEXT}`",
    "code block": f"```\n{TEXT}\n```",
    "typographic quotes": f"“{TEXT}”",
    "low quotes": f"„{TEXT}“",
    "single typographic": f"‘{TEXT}’",
    "guillemets": f"«\u202f{TEXT}\u202f»",
    "angle brackets": f"<{TEXT}>",
    "round brackets": f"({TEXT}).",
    "full stop": f"{TEXT}.",
    "ellipsis": f"{TEXT}…",
    "comma": f"{TEXT},",
    "exclamation": f"{TEXT}!!",
    "padding": f"{TEXT}==",
    "wrapped at 76": wrapped(76),
    "wrapped at 20 for Windows": wrapped(20, end="\r\n"),
    "wrapped inside the prefix": wrapped(5),
    "one character a line": wrapped(1),
    "indented": wrapped(40, "    "),
    "quoted mail": wrapped(60, "> "),
    "quoted twice": wrapped(60, "> > "),
    "quoted without a space": wrapped(60, ">"),
    "quoted inside the prefix": wrapped(4, "> "),
    "quoted-printable": wrapped(60, end="=\n"),
    "continued in a shell": wrapped(60, end=" \\\n"),
    "non-breaking spaces": wrapped(30, end="\u00a0"),
    "zero-width spaces": "\u200b".join(TEXT),
    "soft hyphens": "\u00ad".join(TEXT),
    "byte order mark": "\ufeff" + TEXT,
    "direction marks": f"\u202a{TEXT}\u202c",
    "whole command": f"collab train {TEXT}",
    "command with a prompt": f"$ collab train '{TEXT}'\n",
    "command with flags": f"collab train {TEXT} --device cpu --name bob",
    "wrapped command": textwrap.fill(f"collab train {TEXT}", 60, break_on_hyphens=False),
    "in a sentence": f"Hi! Join with {TEXT}, it is fun. -- Alice",
    "wrapped in a mail with a signature": f"Please join:\n\n{wrapped(70)}\n\n-- \nAlice",
    "python": f'INVITE = "{TEXT}"  # paste here',
    "link": f'<a href="#{TEXT}">join</a>',
    "bracketed paste": f"\x1b[200~{TEXT}\x1b[201~",
    "capital by a phone": "C" + TEXT[1:],
    "twice": f"{TEXT}\n{TEXT}",
}


@pytest.mark.parametrize("pasted", PASTED.values(), ids=PASTED.keys())
def test_an_invite_survives_being_pasted(pasted: str) -> None:
    assert Invite.decode(pasted) == INVITE
    assert looks_like_invite(pasted)


@pytest.mark.parametrize("width", range(1, len(TEXT), 7))
def test_an_invite_survives_any_line_width(width: int) -> None:
    assert Invite.decode(wrapped(width)) == INVITE
    assert Invite.decode(wrapped(width, "> ")) == INVITE


@pytest.mark.parametrize(
    "text", ["", " \n", "my-run", "./my-run/run.toml", "collab_", "collab train", "collab1", "x" * 100_000]
)
def test_what_is_nothing_like_an_invite_is_said_to_be_none(text: str) -> None:
    assert refusal(text).code is Code.BAD_INVITE
    assert not looks_like_invite(text)
    assert len(str(refusal(text))) < 300


@pytest.mark.parametrize(
    "path", ["./collab1_runs", "/home/me/collab1_runs/run.toml", "C:\\collab1_runs", "my-collab1_x"]
)
def test_a_path_is_not_taken_for_an_invite(path: str) -> None:
    assert not looks_like_invite(path)


@pytest.mark.parametrize("prefix", ["collab2_", "collab9_", "collab0_", "collab12_", "collab train collab3_"])
def test_an_invite_of_another_version_says_so(prefix: str) -> None:
    text = prefix + TEXT.removeprefix("collab1_")
    assert refusal(text).code is Code.NEWER_INVITE
    assert "collab1_" in refusal(text).message
    assert looks_like_invite(text)


def test_an_invite_cut_anywhere_is_refused_with_the_number_of_characters_seen() -> None:
    for length in range(len("collab1_"), len(TEXT)):
        error = refusal(TEXT[:length])
        assert error.code is Code.CUT_INVITE
        assert f" {length} characters were seen" in error.message
        assert "whole" in error.fix


def test_an_invite_cut_inside_its_prefix_is_refused() -> None:
    for length in range(len("collab1_")):
        assert refusal(TEXT[:length]).code is Code.BAD_INVITE


def test_a_piece_missing_in_the_middle_is_refused() -> None:
    for start in range(len("collab1_"), len(TEXT) - 1):
        assert refusal(TEXT[:start] + TEXT[start + 1 :]).code is Code.CUT_INVITE


@pytest.mark.parametrize("char", list("Aaz09_-+/=.! \n\u200b\0é>\"'\x1b1"))
def test_no_changed_character_gives_another_invite(char: str) -> None:
    for position in range(len(TEXT)):
        for text in (TEXT[:position] + char + TEXT[position + 1 :], TEXT[:position] + char + TEXT[position:]):
            try:
                assert Invite.decode(text) == INVITE
            except CollabError as error:
                assert error.code in (Code.BAD_INVITE, Code.CUT_INVITE, Code.NEWER_INVITE)  # noqa: PT017


def test_swapped_characters_are_refused() -> None:
    for position in range(len("collab1_"), len(TEXT) - 1):
        first, second = TEXT[position], TEXT[position + 1]
        if first != second:
            assert refusal(TEXT[:position] + second + first + TEXT[position + 2 :]).code is Code.CUT_INVITE


GOOD = [RUN_HASH, MARK, [PEER], "my-run"]


@pytest.mark.parametrize(
    "fields",
    [
        None,
        7,
        {},
        [],
        GOOD[:3],
        [*GOOD, 1],
        [RUN_HASH[:-1], *GOOD[1:]],
        [RUN_HASH.hex(), *GOOD[1:]],
        [RUN_HASH, MARK + b"\0", *GOOD[2:]],
        [RUN_HASH, None, *GOOD[2:]],
        [RUN_HASH, MARK, [], ""],
        [RUN_HASH, MARK, PEER, ""],
        [RUN_HASH, MARK, {PEER: 1}, ""],
        [RUN_HASH, MARK, [PEER] * 17, ""],
        [RUN_HASH, MARK, [PEER, 3], ""],
        [RUN_HASH, MARK, [PEER.encode()], ""],
        [RUN_HASH, MARK, ["/dns4/" + "a" * 250 + "/p2p/Q"], ""],
        [RUN_HASH, MARK, ["/ip4/203.0.113.7/tcp/31337"], ""],
        [RUN_HASH, MARK, [PEER + "\n"], ""],
        [RUN_HASH, MARK, ["/ip4/\x1b[2J/p2p/Q"], ""],
        [RUN_HASH, MARK, [PEER], "../etc"],
        [RUN_HASH, MARK, [PEER], "my-run\n"],
        [RUN_HASH, MARK, [PEER], "x" * 49],
        [RUN_HASH, MARK, [PEER], None],
        [RUN_HASH, MARK, [PEER], msgpack.ExtType(5, b"x")],
        [RUN_HASH, MARK, [PEER], msgpack.Timestamp(1)],
    ],
)
def test_contents_that_no_invite_has_are_refused_even_with_a_right_checksum(fields: object) -> None:
    assert refusal(encoded(fields)).code is Code.CUT_INVITE


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", msgpack.packb(GOOD) + b"\0"])
def test_bytes_that_are_not_msgpack_are_refused_even_with_a_right_checksum(packed: bytes) -> None:
    text = "collab1_" + base64.urlsafe_b64encode(packed + blake3(packed).digest()[:4]).decode().rstrip("=")
    assert refusal(text).code is Code.CUT_INVITE


def test_the_helper_of_these_tests_encodes_as_the_code_does() -> None:
    assert Invite.decode(encoded(GOOD)).name == "my-run"


@pytest.mark.parametrize(
    "text", ["collab1_" + "A " * 20_000, "collab1_" * 5000, "c " * 50_000, "collab1_" + "A" * 1_000_000, ">" * 100_000]
)
def test_a_huge_paste_is_refused_quickly(text: str) -> None:
    assert refusal(text).code in (Code.CUT_INVITE, Code.BAD_INVITE)


@pytest.mark.parametrize(
    "changes",
    [{"run_hash": b""}, {"fingerprint": bytes(32)}, {"initial_peers": ()}, {"initial_peers": ("x",)}, {"name": "A b"}],
)
def test_an_invite_that_nobody_could_read_cannot_be_made(changes: dict[str, object]) -> None:
    fields: dict[str, object] = {"run_hash": RUN_HASH, "fingerprint": MARK, "initial_peers": (PEER,)}
    with pytest.raises(ValueError, match=r"wrong length|1 to 16 peers|not a "):
        Invite(**(fields | changes))  # type: ignore[arg-type]
