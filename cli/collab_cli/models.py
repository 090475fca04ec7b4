"""`collab models`: every version of a model that this machine keeps."""

from __future__ import annotations

import enum
import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from collab_cli.failures import errors_in_words
from collab_cli.stopping import Stopping
from collab_cli.terminal import Terminal, print_json

if TYPE_CHECKING:
    from collab_core.archive import Archive, Version

app = typer.Typer(name="models", help="Every version of a model: list, compare, recover.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
StateDir = Annotated[
    Path | None,
    typer.Option("--state-dir", help="A peer's state folder, or an archive. Default: this machine's only one."),
]
Reference = Annotated[str, typer.Argument(help="A tag, latest, epoch:12, or the beginning of a root.", metavar="REF")]
console = Terminal()
LEVELS = {"R2": "the same model came out (R2).", "R3": "another model came out that is as good (R3)."}


class Preference(enum.StrEnum):
    """What the archive should be good at."""

    storage = "storage"
    balanced = "balanced"
    speed = "speed"


PreferOption = Annotated[
    Preference, typer.Option("--prefer", help="Keep it small, quick to get back, or something between.")
]


@contextmanager
def opened(
    state_dir: Path | None, *, may_create: bool = False, prefer: Preference = Preference.balanced
) -> Iterator[Archive]:
    with errors_in_words(), Stopping():
        from collab_core.archive import Archive, Prefer
        from collab_core.archive.places import locate

        archive = Archive(locate(state_dir, may_create=may_create), prefer=Prefer(prefer.value))
        try:
            yield archive
        finally:
            archive.close()


@app.command("log")
def log(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """List all versions, newest first."""
    with opened(state_dir) as archive:
        from collab_core.archive import report

        rows = report.log(archive)
        if as_json:
            print_json({"versions": rows})
            return
        table = Table(box=None, header_style="dim")
        for heading in ("ref", "root", "loss", "kept as", "size", "made", "tags"):
            table.add_column(heading, justify="right" if heading in ("loss", "size") else "left")
        for row in rows:
            loss = "" if row["loss"] is None else f"{row['loss']:.3f}"
            created = row["created"].replace("T", " ")[:16]
            tags = escape(", ".join(row["tags"]))
            table.add_row(
                escape(row["ref"]), row["root"][:12], loss, row["encoding"], size_of(row["bytes"]), created, tags
            )
        console.print(table)


@app.command("show")
def show(reference: Reference, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Where a version comes from, and what it holds."""
    with opened(state_dir) as archive:
        from dataclasses import asdict

        version = archive.find(reference)
        document = {
            "root": version.root,
            "parent": version.parent,
            "level": version.level,
            "provenance": asdict(version.provenance),
            "files": [file.name for file in version.files],
            "tensors": [
                {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape)} for entry in version.entries()
            ],
        }
        if as_json:
            print_json(document)
            return
        console.print(f"root    {version.root}\nparent  {version.parent or '–'}\nlevel   {version.level}")
        for key, value in asdict(version.provenance).items():
            if value not in (None, {}):
                console.print(f"{key:<7} {escape(json.dumps(value) if isinstance(value, dict) else str(value))}")
        total = sum(entry.num_bytes for entry in version.entries())
        console.print(f"holds   {len(version.entries())} tensors, {size_of(total)}")


@app.command("diff")
def diff(
    old: Annotated[str, typer.Argument(help="A version.", metavar="A")],
    new: Annotated[str, typer.Argument(help="Another one.", metavar="B")],
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """What changed between two versions, and what it would take to send the change."""
    with opened(state_dir) as archive:
        from collab_core.archive import report

        document = report.diff(archive, archive.find(old), archive.find(new))
        if as_json:
            print_json(document)
            return
        relative = document["relative_update"]
        moved = "" if relative is None else f", relative update {relative:.2e}"
        console.print(
            f"{document['changed']} of {document['tensors']} tensors changed{moved}; "
            f"{size_of(document['transfer_bytes'])} to transfer"
        )
        for row in sorted(document["changes"], key=lambda row: -(row["relative"] or 0))[:20]:
            change = "" if row["relative"] is None else f"{row['relative']:.2e}"
            console.print(f"  {change:>9}  {escape(row['name'])}")


@app.command("save")
def save(
    checkpoint: Annotated[Path, typer.Argument(help="A .safetensors file, or a folder with model.safetensors.")],
    parent: Annotated[str | None, typer.Option(help="The version it was made from.", metavar="REF")] = None,
    tag: Annotated[str | None, typer.Option(help="A name for it.")] = None,
    seed: Annotated[int | None, typer.Option(help="What it was trained with.")] = None,
    data: Annotated[list[Path] | None, typer.Option(help="A file it was trained on. May be repeated.")] = None,
    code: Annotated[list[Path] | None, typer.Option(help="A file that trained it. May be repeated.")] = None,
    prefer: PreferOption = Preference.balanced,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Keep a model of your own, as a difference to the version it was made from."""
    with opened(state_dir, may_create=True, prefer=prefer) as archive:
        from collab_core.archive.variants import local_provenance, save_checkpoint

        origin = local_provenance(seed=seed, data=data or [], code=code or [])
        base = archive.find(parent) if parent else None
        version = save_checkpoint(archive, checkpoint, parent=base, provenance=origin)
        if tag:
            archive.tag(tag, version)
        if as_json:
            print_json({"root": version.root, "parent": version.parent, "tag": tag})
        else:
            _tell_saved(version, tag)


def _tell_saved(version: Version, tag: str | None) -> None:
    name = escape(tag or version.root[:12])
    console.print(f"Saved [bold]{name}[/bold], root {version.root}", soft_wrap=True)


@app.command("tag")
def tag(
    reference: Reference,
    name: Annotated[str, typer.Argument(help="What to call it.", metavar="NAME")],
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Give a version a name. Versions with a name are never dropped."""
    with opened(state_dir) as archive:
        version = archive.find(reference)
        archive.tag(name, version)
        if as_json:
            print_json({"tag": name, "root": version.root})
        else:
            console.print(f"[bold]{escape(name)}[/bold] is {version.root[:12]} now.")


@app.command("recover")
def recover(
    reference: Reference,
    output: Annotated[Path, typer.Option("-o", "--output", help="model.safetensors, or a folder.")],
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Get a version back, bit for bit, as a file or as a folder that `from_pretrained` loads."""
    with opened(state_dir) as archive:
        from collab_core.archive import recover as recover_version

        version = archive.find(reference)
        num_bytes = recover_version(archive, version, output)
        if as_json:
            print_json({"root": version.root, "output": str(output), "bytes": num_bytes})
        else:
            console.print(f"{output}: {size_of(num_bytes)}, every byte checked against {version.root[:12]}.")


@app.command("record", context_settings={"ignore_unknown_options": True})
def record(
    command: Annotated[
        list[str], typer.Argument(help="Makes a model in {output} from the one in {parent}.", metavar="-- COMMAND…")
    ],
    parent: Annotated[str, typer.Option(help="The version it is made from.", metavar="REF")],
    tag: Annotated[str | None, typer.Option(help="A name for it.")] = None,
    seed: Annotated[int, typer.Option(help="{seed} in the command, and COLLAB_SEED for it.")] = 0,
    data: Annotated[list[Path] | None, typer.Option(help="A file the command reads. May be repeated.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="The command prints a metric last; within this share of it, a model is as good."),
    ] = None,
    prefer: PreferOption = Preference.balanced,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Run a training on a version, and keep what comes out with all it takes to repeat it."""
    with opened(state_dir, prefer=prefer) as archive:
        from collab_core.archive import recipes

        base = archive.find(parent)
        version = recipes.record(archive, base, command, seed=seed, data=data or [], tolerance=tolerance)
        if tag:
            archive.tag(tag, version)
        if as_json:
            print_json({"root": version.root, "parent": version.parent, "tag": tag})
        else:
            _tell_saved(version, tag)


@app.command("verify")
def verify(
    replay: Annotated[
        str | None, typer.Option(help="Also train this version again, and see whether it comes out.", metavar="REF")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Run its command even if somebody else saved it.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Read everything and check it. Exit code 1 if something is wrong."""
    with opened(state_dir) as archive:
        from collab_core.archive import verify as verify_archive

        num_checked, bad = verify_archive(archive)
        level: str | None = None
        if replay is not None and not bad:
            level, bad = _replay(archive, replay, is_allowed=yes)
        if as_json:
            print_json({"ok": not bad, "checked": num_checked, "bad": bad})
        else:
            console.print(f"{num_checked} versions read." if not bad else f"{num_checked} versions read, damaged:")
            if level:
                console.print(f"{escape(replay or '')} was trained again: {LEVELS[level]}")
            for line in bad:
                console.print(f"  {escape(line)}", style="red")
        if bad:
            raise typer.Exit(1)


def _replay(archive: Archive, reference: str, *, is_allowed: bool) -> tuple[str | None, list[str]]:
    """The level that a version's recipe has proved, or what is wrong with it."""
    from collab_core.archive import recipes
    from collab_core.errors import ArchiveError, Code

    version = archive.find(reference)
    recipe = version.provenance.recipe
    if recipe is not None and not is_allowed and not archive.is_ours(version):
        raise ArchiveError(
            Code.NO_RECIPE,
            f"Somebody else saved {reference!r}, and its recipe runs a command: {shlex.join(recipe['command'])}",
            fix="If you trust it: --yes",
        )
    try:
        return recipes.replay(archive, version), []
    except ArchiveError as error:
        if error.code is not Code.RECIPE_FAILED:
            raise
        return None, [f"{reference}: {error.message}"]


@app.command("size")
def size(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """What the archive takes on disk, beside what its versions would take."""
    with opened(state_dir) as archive:
        from collab_core.archive import report

        document = report.size(archive)
        if as_json:
            print_json(document)
            return
        share = "" if document["ratio"] is None else f" ({document['ratio']:.0%} of {size_of(document['raw_bytes'])})"
        console.print(f"{document['versions']} versions in {size_of(document['stored_bytes'])}{share}")


@app.command("cost")
def cost(reference: Reference, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """What a version takes to keep, to send and to get back: as it is, whole, as a difference, trained again."""
    with opened(state_dir) as archive:
        from dataclasses import asdict

        from collab_core.archive import predict

        version = archive.find(reference)
        costs = {way: asdict(found) for way, found in predict(archive, version).items()}
        if as_json:
            print_json({"root": version.root, "costs": costs})
            return
        table = Table(box=None, header_style="dim")
        for heading in ("kept", "to store", "to send", "to recover"):
            table.add_column(heading, justify="left" if heading == "kept" else "right")
        for way, found in costs.items():
            sizes = size_of(found["bytes"]), size_of(found["transfer_bytes"])
            table.add_row(way, *sizes, f"{found['seconds']:.2f} s")
        console.print(table)


@app.command("gc")
def gc(
    last: Annotated[int, typer.Option(min=1, help="Keep this many of the newest.")] = 20,
    every: Annotated[list[int] | None, typer.Option(min=1, help="Keep every n-th too. [default: 10, 100]")] = None,
    prefer: PreferOption = Preference.balanced,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Drop old versions. What has a tag, or a variant made from it, stays."""
    with opened(state_dir, prefer=prefer) as archive:
        from collab_core.archive import Keep

        dropped = archive.collect_garbage(Keep(last, tuple(every or (10, 100))))
        if as_json:
            print_json({"dropped": [version.root for version in dropped]})
        else:
            console.print(f"Dropped {len(dropped)} versions.")


def size_of(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"
