"""The commands of the front page and the how-tos are typed as they stand; what is changed or left out is listed."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from causal_lm import write_texts
from pages import DOCS, ROOT, commands, pages
from processes import without_colours
from terminals import Terminals

from collab_core.run import Invite

README = ROOT / "README.md"
TALK = [README, *(DOCS / "how-to" / f"{name}.md" for name in ("organise", "join", "doctor", "watch-a-run"))]
MODELS = [DOCS / "how-to" / "own-model.md", DOCS / "how-to" / "publish-model.md"]

ELSEWHERE = {
    DOCS / "tutorial.md": "typed in tests/docs/test_console_blocks.py",
    DOCS / "tutorials" / "custom-task.md": "typed in tests/docs/test_custom_task_tutorial.py",
    DOCS / "how-to" / "keep-versions.md": "typed in tests/docs/test_keep_versions.py",
}
NOT_RUN_HERE = {
    "collab demo my-run --epochs 20": "runs in tests/cli/test_mistakes.py, for 8 epochs",
    "collab publish-model my-model --to ./my-weights": "runs in tests/swarm/test_causal_lm.py, before a training",
    "collab publish-model my-model --to owner/name": (
        "the real Hub is not for tests: runs in tests/hub/test_hub_publishing.py, the real client against a small Hub"
    ),
    "make demo": "would install everything again; the `collab demo` it calls runs in tests/cli/test_mistakes.py",
    "make test": "this test is part of it",
    "make bench": "takes half an hour; not a test",
    "make lint": "`make test` runs it first",
    "make docs": "would install everything again; the `mkdocs build` it calls runs in tests/docs/test_site.py",
    "make venv": "whoever runs this test has done that, or has another environment",
    "source .venv/bin/activate": "the same",
    "pre-commit install": "would change the clone in which the tests run",
    "python -m pytest tests/unit": "a part of `make test`",
    "python docs/generate_reference.py": "would write into the clone; tests/docs/test_reference.py runs it, --check",
}
# what stands in the page, and what is typed here instead
CHANGES = {
    r"collab1_…": '"$(cat invite.txt)"',
    r"/ip4/(203\.0\.113\.7|198\.51\.100\.4)/": "/ip4/127.0.0.1/",  # public addresses of nobody: loopback instead
    r"12D3KooW…": "{peer_id}",
    r"0\.0\.0\.0:": "127.0.0.1:",  # nobody else should look on
    r"3133[01]|8420": "{port}",  # any free one: somebody's peer may have that of the page
    r"--epochs 20": "--epochs 1 --peers 1",  # that it runs is the question, not what it has learnt by then
}
ONLY_HERE = " --host-maddrs /ip4/127.0.0.1/tcp/0"  # as in the tutorial: no test listens where others can connect


def typed(text: str, peer_id: str = "") -> str:
    """A command of a page as it is typed here."""
    for pattern, instead in CHANGES.items():
        text = re.sub(pattern, instead, text)
    text = text.format(peer_id=peer_id, port=free_port())
    return text + ONLY_HERE if listens(text) and "--client-mode" not in text else text


def listens(text: str) -> bool:
    return is_peer(text) or text.startswith("collab doctor")


def is_peer(text: str) -> bool:
    return text.startswith(("collab aux", "collab train"))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def commands_of(*of_pages: Path) -> list[str]:
    """What the pages tell people to type, each once, in their order."""
    found = dict.fromkeys(command.text for page in of_pages for command in commands(page))
    return [text for text in found if text not in NOT_RUN_HERE]


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    terminals = Terminals(tmp_path)
    yield terminals
    assert terminals.close() == []


def test_every_command_is_run_by_a_test_or_its_absence_explained() -> None:
    covered = {*commands_of(*TALK, *MODELS), *NOT_RUN_HERE}
    for page in pages():
        if page not in ELSEWHERE:
            assert {command.text for command in commands(page)} <= covered, page.name
    assert NOT_RUN_HERE.keys() <= {command.text for page in pages() for command in commands(page)}, "explains too much"
    assert all((ROOT / path).is_file() for why in (*NOT_RUN_HERE.values(), *ELSEWHERE.values()) for path in _named(why))
    assert [text for text in commands_of(README) if not text.startswith("collab ")] == [], "the README says so"


def _named(words: str) -> list[str]:
    return re.findall(r"tests/[\w/]+\.py", words)


@pytest.mark.timeout(300)
def test_the_front_page_and_the_pages_for_organisers_and_volunteers_work_as_written(terminals: Terminals) -> None:
    todo = commands_of(*TALK)
    for text in [text for text in todo if text.startswith("collab new")]:
        assert "Created" in terminals.finish(terminals.start(typed(text)))
    (terminals.folder / "my-texts").mkdir()  # this run's corpus is generated, so nothing in it is read

    first_aux, first_trainer = (next(text for text in todo if text.startswith(f"collab {role}")) for role in ROLES)
    auxiliary = terminals.start(typed(first_aux))
    terminals.wait_for(lambda: "Press Ctrl-C" in terminals.output(auxiliary), "the invite")
    invite = re.findall(r"^collab train (collab1_\S+)$", terminals.output(auxiliary), re.MULTILINE)[0]
    (terminals.folder / "invite.txt").write_text(invite)
    peer_id = Invite.decode(invite).initial_peers[0].rpartition("/")[2]
    trainer = terminals.start(typed(first_trainer))
    terminals.wait_for(lambda: "\nepoch    1" in terminals.output(trainer), "the first epoch")
    first_look, *looks = [text for text in todo if text.startswith("collab status")]
    table = terminals.finish(terminals.start(typed(first_look)))
    assert table.startswith("Run my-run, ")
    assert "aux" in table
    look_on(terminals, [text for text in todo if text.startswith(("collab watch", "collab sample"))])
    leave(terminals, trainer)
    (recover,) = [text for text in todo if text.startswith("collab models")]
    said = terminals.finish(terminals.start(typed(recover)))
    assert (terminals.folder / "model" / "model.safetensors").exists(), said

    looks += [text for text in todo if text.startswith(("collab doctor", "collab tune", "collab dashboard"))]
    others = [text for text in todo if is_peer(text) and text not in (first_aux, first_trainer)] + looks
    assert len(others) >= 14
    lines = [shlex.quote(typed(text, peer_id).replace('"$(cat invite.txt)"', invite)) for text in others]
    visits = terminals.start(f"{sys.executable} {DOCS.parent}/tests/docs/visits.py {' '.join(lines)}")
    for text, (exit_code, said) in zip(others, json.loads(terminals.finish(visits)), strict=True):
        assert exit_code == 0, f"{text}\n{said}"
        if is_peer(text):
            assert re.search(
                r"^Joined the run.* as my-laptop\." if "my-laptop" in text else "^Joined", said, re.MULTILINE
            )
            assert re.search("^Left", said, re.MULTILINE), said
            assert ("Dashboard: http://" in said) == ("--dashboard" in text)
        elif text.startswith("collab doctor"):
            assert ('"aux": true' if "--json" in text else "You can be a trainer.") in said, said
        elif text.startswith("collab tune"):
            assert "`collab train` takes" in said
        elif text.startswith("collab dashboard"):
            assert re.search("^Showing my-run.* at http://", said, re.MULTILINE), said
        else:
            assert [peer["role"] for peer in json.loads(said)["peers"]].count("aux") >= 1
    leave(terminals, auxiliary)


ROLES = ("aux", "train")


def look_on(terminals: Terminals, todo: list[str]) -> None:
    """The commands for those who do not take part, while somebody trains."""
    watch, sample = map(typed, todo)
    lines = terminals.start(watch)
    screen = terminals.start(f"env TERM=xterm LINES=24 script -qefc 'exec {watch}' /dev/null")  # not a shell's child
    assert re.search("^the ", terminals.finish(terminals.start(sample)), re.MULTILINE)
    terminals.wait_for(
        lambda: re.search(r"^epoch +\d+  loss \d", terminals.output(lines), re.MULTILINE) is not None, "a line"
    )
    terminals.wait_for(lambda: "samples, " in terminals.output(screen), "the view")
    for shown in (
        r"now +\S*\d trainers? (?:is|are) (?:collecting samples for|averaging) epoch \d",
        r"given +\S*[\d,]+ samples by everyone",
        "peer",
    ):
        terminals.wait_for(lambda shown=shown: bool(re.search(shown, without_colours(terminals.output(screen)))), shown)  # type: ignore[misc]
    for process in (lines, *psutil.Process(screen.pid).children()):  # `script` itself would not pass it on
        process.send_signal(signal.SIGINT)
    for ended in (lines, screen):
        assert "Traceback" not in terminals.finish(ended)


def leave(terminals: Terminals, peer: subprocess.Popen[bytes]) -> None:
    peer.send_signal(signal.SIGINT)
    assert "\nLeft at epoch" in terminals.finish(peer)


@pytest.mark.timeout(300)
def test_the_page_on_ones_own_model_works_as_written(terminals: Terminals) -> None:
    new, demo = commands_of(*MODELS)
    assert "collab aux my-model" in terminals.finish(terminals.start(typed(new)))
    run = terminals.folder / "my-model"
    write_texts(run / "data")
    text = (run / "run.toml").read_text()
    for key, value in {
        "target_batch_size": 32,
        "sequence_length": 64,
        "num_hidden_layers": 1,
        "num_sequences": 4,
    }.items():
        text, num_changed = re.subn(rf"^{key} = \d+", f"{key} = {value}", text, flags=re.MULTILINE)
        assert num_changed == 1, key
    (run / "run.toml").write_text(text)  # as people do: an epoch should not take a minute
    assert "bit for bit" in terminals.finish(terminals.start(typed(demo)))
