"""One error family. Every failure a person can cause has a stable code, says what was seen and what to do next."""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """Stable codes: number, title. Each has a page section in docs/reference/errors.md (checked by a test)."""

    RUN_NOT_FOUND = (101, "The run file cannot be read")
    RUN_NOT_TOML = (102, "The run file is not valid TOML")
    UNKNOWN_KEY = (103, "Unknown key in the run file")
    BAD_VALUE = (104, "A value in the run file is not allowed")
    BAD_COMBINATION = (105, "Two settings of the run file contradict each other")
    NO_ORGANISER_KEY = (106, "The organiser's key is missing or unreadable")
    FOLDER_EXISTS = (107, "The run folder already exists")
    BAD_OPTION = (108, "A command-line option has a value that is not allowed")
    BAD_ASSETS = (109, "The files of the run's model cannot travel to its peers")
    BAD_INVITE = (110, "This is not an invite")
    CUT_INVITE = (111, "The invite is incomplete or damaged")
    NEWER_INVITE = (112, "The invite was made by another version of Collab")
    SETTINGS_DIFFER = (113, "Your run file differs from the run")
    CANNOT_PIN = (114, "The run file cannot be changed safely")
    UNREACHABLE = (201, "None of the first peers can be reached")
    PORT_TAKEN = (202, "The port is already in use")
    DAEMON_FAILED = (203, "The network daemon did not start, or ended")
    NO_MANIFEST = (204, "Nobody could give us the run's manifest")
    WRONG_MANIFEST = (205, "The manifest is not the one the invite promises")
    BAD_SIGNATURE = (206, "The manifest is not signed by the organiser")
    BAD_ADDRESS = (207, "An address is not a multiaddress")
    CANNOT_LISTEN = (208, "The dashboard cannot listen there")
    STATE_DIR_UNWRITABLE = (301, "The state folder cannot be written")
    STATE_DIR_IN_USE = (302, "The state folder is in use by another peer")
    NO_STATE = (303, "No peer could give us the model's state")
    BAD_BACKUP = (304, "The backup on disk is damaged")
    NO_ASSETS = (305, "Nobody could give us the files of the run's model")
    ARCHIVE_UNWRITABLE = (311, "The archive cannot be opened or written")
    NO_VERSION = (312, "The archive has no such version")
    DAMAGED_VERSION = (313, "A version in the archive is damaged")
    CANNOT_RECOVER = (314, "The recovered model cannot be written")
    BAD_CHECKPOINT = (315, "The checkpoint cannot be read")
    NO_ARCHIVE = (316, "There is no archive here, or more than one")
    NO_RECIPE = (317, "The version cannot be trained again")
    RECIPE_FAILED = (318, "A recipe did not lead to the model")
    NO_TRANSFER = (319, "A peer does not give or take a version")
    UNKNOWN_TASK = (401, "The run's task is not known here")
    BAD_TASK_OPTION = (402, "An option of the task is not allowed")
    NO_DEVICE = (403, "The requested device is not available")
    UNSUPPORTED_MODEL = (404, "The model cannot be kept identical on every peer")
    NO_DATA = (405, "The data cannot be read, or has no sample in it")
    BAD_MODEL = (406, "The model's config or weights cannot be used")
    BAD_TOKENIZER = (407, "The tokenizer cannot be used")
    NO_OPTIMIZER = (408, "The run's optimizer is not available here")
    MACHINE_UNFIT = (409, "This machine cannot take part as it is")
    OUT_OF_MEMORY = (410, "The model does not fit into memory")
    TASK_NOT_INSTALLED = (411, "The run's task is not installed here")
    BAD_TASK = (412, "The package of the task cannot be used")
    TASK_FAILED = (413, "The task failed")
    INTERNAL = (500, "Something went wrong inside Collab")
    PEER_FAILED = (501, "A peer of the demo failed")
    HUB_UNREACHABLE = (601, "The Hub cannot be reached")
    HUB_DENIED = (602, "The Hub refuses: no token, or not enough rights")
    HUB_NOT_FOUND = (603, "The Hub does not have that repository, revision or file")
    HUB_BROKEN = (604, "A download from the Hub or an upload to it broke off")

    def __init__(self, number: int, title: str) -> None:
        self.number = number
        self.title = title

    def __str__(self) -> str:
        return f"COLLAB-{self.number}"


class CollabError(Exception):
    """Something went wrong that a person should know about.

    Args:
        code: which failure this is.
        message: what happened, with the value that was seen.
        fix: what to do or type next.
    """

    exit_code = 1

    def __init__(self, code: Code, message: str, *, fix: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.code}: {self.message} {self.fix}"


class ConfigError(CollabError):
    """The run file, an invite or an option is wrong: a user's mistake."""

    exit_code = 2


class SwarmError(CollabError):
    """The swarm cannot be joined: address, port, manifest, identity."""

    exit_code = 2


class StateError(CollabError):
    """The state folder, a backup or a state download is not usable."""

    exit_code = 2


class ArchiveError(CollabError):
    """The archive of versions cannot do what it was asked for."""

    exit_code = 2


class TaskError(CollabError):
    """The task, its options or the device cannot be used here."""

    exit_code = 2


class HubError(CollabError):
    """The Hub, or a folder that stands for it, does not give or take what it should."""

    exit_code = 2


class RunError(CollabError):
    """The run itself failed, through no mistake of the person who typed the command."""

    exit_code = 1
