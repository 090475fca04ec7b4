"""The Hub through `huggingface_hub`: what can go wrong there, said in words."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from collab_core.errors import Code, CollabError, HubError, TaskError

HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
FULL = (402, 413, 507)  # to be paid for, too large, no storage left
QUOTA = re.compile(r"quota|storage|exceeded|upgrade|too large|no space", re.IGNORECASE)
MAX_SAID_CHARS = 240
NETWORK = (
    "huggingface_hub",
    "httpx",
    "httpx2",
    "httpcore",
    "httpcore2",
    "requests",
    "urllib3",
    "aiohttp",
    "fsspec",
    "ssl",
)
LOGIN = "Log in with `hf auth login`, or set HF_TOKEN, with an account that may do this."


def is_hub_name(text: str) -> bool:
    """Whether this is the name of a repository: `owner/name`."""
    return HUB_NAME.fullmatch(text) is not None


def make_repository(repo: str, *, is_private: bool) -> None:
    """Make a model's repository unless it is there: whoever may not write to it hears that before anything heavy.

    Raises:
        HubError: in words.
    """
    from huggingface_hub import HfApi

    with hub_in_words(repo):
        HfApi().create_repo(repo, private=is_private, exist_ok=True)


def download_file(repo: str, revision: str, name: str, *, is_required: bool = True) -> Path | None:
    """A file of a model's repository, from this machine's cache or from the Hub; None if it has none of that name.

    Raises:
        HubError: in words.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with hub_in_words(repo, revision, file=name):
        try:
            return Path(hf_hub_download(repo, name, revision=revision))
        except EntryNotFoundError as error:
            if is_required or isinstance(error, LocalEntryNotFoundError):  # local: there was no answer at all
                raise
            return None


def download_folder(repo: str, revision: str, patterns: list[str]) -> Path:
    """Those files of a model's repository whose names match, in a folder.

    Raises:
        HubError: in words.
    """
    from huggingface_hub import snapshot_download

    with hub_in_words(repo, revision):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))


def check_data_set(repo: str, revision: str) -> None:
    """Ask for a data set by itself: `datasets` says "does not exist or cannot be accessed" whatever the reason."""
    from huggingface_hub import HfApi

    with hub_in_words(repo, revision, kind="dataset"):
        HfApi().dataset_info(repo, revision=revision)


@contextlib.contextmanager
def hub_in_words(
    repo: str, revision: str = "", *, kind: Literal["model", "dataset"] = "model", file: str = ""
) -> Iterator[None]:
    """Whatever the Hub, the way there or the client says, as an error with a code."""
    _be_quiet()
    try:
        yield
    except (CollabError, KeyboardInterrupt, GeneratorExit):
        raise
    except Exception as error:
        what = f"{kind} {repo}" if kind == "model" else f"data set {repo}"
        where = f" at revision {revision[:12]}" if revision else ""
        whole = f"{what}{where}" + (f", file {file}" if file else "")
        if kind == "dataset" and not any(map(_is_of_the_network, _chain(error))):
            raise TaskError(
                Code.NO_DATA,
                f"The {whole} cannot be read: {_shortened(str(error)) or type(error).__name__}.",
                fix="Look at the data set: something in it is not as the rest. Or name another one in run.toml.",
            ) from error
        raise _explained(error, whole) from error


def _be_quiet() -> None:
    """No progress bars and no warnings of the client: only the command line talks to people."""
    from huggingface_hub.utils.logging import set_verbosity
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    set_verbosity(logging.CRITICAL)


def _explained(error: Exception, what: str) -> HubError:
    """The one of our errors that this is."""
    from huggingface_hub import errors

    chain = list(_chain(error))
    words = _shortened(str(error))
    status = next((status for one in chain if (status := _status(one)) is not None), None)
    said = next((text for one in chain if (text := _said(one))), words)
    if status in FULL or (status == 403 and QUOTA.search(said)):
        message = f"The Hub has no room for {what}: {said} (status {status}). A quota of this account is used up."
        return HubError(Code.HUB_DENIED, message, fix="Delete what is not needed there, buy storage, or use a folder.")
    if any(isinstance(one, errors.LocalTokenNotFoundError) for one in chain) or status == 401:
        message = f"The Hub refuses {what}: no token, or one it does not know."
        return HubError(Code.HUB_DENIED, message, fix=f"{LOGIN} Or the name is wrong: private and missing look alike.")
    if any(isinstance(one, errors.GatedRepoError) for one in chain) or status == 403:
        message = f"The Hub refuses {what}: this account has no right to it. It says: {said}."
        return HubError(Code.HUB_DENIED, message, fix=f"{LOGIN} Gated repositories ask for consent on their page.")
    if any(isinstance(one, errors.RevisionNotFoundError) for one in chain):
        message = f"The Hub has no such revision: {what}."
        return HubError(
            Code.HUB_NOT_FOUND, message, fix="Correct the revision in run.toml: a commit of that repository."
        )
    if status == 404:
        message = f"The Hub does not have {what}."
        return HubError(Code.HUB_NOT_FOUND, message, fix="Correct the name, or log in if it is private.")
    if status is None and any(_is_unreachable(one) for one in chain):
        message = f"The Hub cannot be reached for {what}: {words}."
        return HubError(
            Code.HUB_UNREACHABLE, message, fix="Check the network, and HF_ENDPOINT and HF_HUB_OFFLINE if you set them."
        )
    answer = f" (status {status})" if status is not None else ""
    message = f"The exchange with the Hub about {what} broke off{answer}: {words}."
    return HubError(Code.HUB_BROKEN, message, fix="Try again; what was transferred whole is kept.")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _said(error: BaseException) -> str:
    """The Hub's own words, without what the client says around them."""
    return _shortened(getattr(error, "server_message", None) or "")


def _shortened(text: str) -> str:
    return " ".join(text.split())[:MAX_SAID_CHARS].rstrip(".")


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_of_the_network(error: BaseException) -> bool:
    """Whether it has to do with the Hub or the way there, and not with what was read."""
    return isinstance(error, OSError | EOFError) or type(error).__module__.partition(".")[0] in NETWORK


def _is_unreachable(error: BaseException) -> bool:
    """No answer at all. By name: the client's HTTP library has changed before."""
    return isinstance(error, ConnectionError) or type(error).__name__ in (
        "ConnectError",
        "ConnectTimeout",
        "OfflineModeIsEnabled",
    )
