"""`collab models`: every version of a model that this machine keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from collab_cli.failures import errors_in_words

if TYPE_CHECKING:
    from collab_core.archive import Archive

app = typer.Typer(name="models", help="Every version of a model: list, compare, recover.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
StateDir = Annotated[
    Path | None,
    typer.Option("--state-dir", help="A peer's state folder, or an archive. Default: this machine's only one."),
]
Reference = Annotated[str, typer.Argument(help="A tag, latest, epoch:12, or the beginning of a root.", metavar="REF")]
console = Console(highlight=False)


@contextmanager
def opened(state_dir: Path | None, *, may_create: bool = False) -> Iterator[Archive]:
    with errors_in_words():
        from collab_core.archive import Archive
        from collab_core.archive.places import locate

        archive = Archive(locate(state_dir, may_create=may_create))
        try:
            yield archive
        finally:
            archive.close()


def show_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


@app.command("log")
def log(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """List all versions, newest first."""
    with opened(state_dir) as archive:
        from collab_core.archive import report

        rows = report.log(archive)
        if as_json:
            show_json({"versions": rows})
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
            show_json(document)
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
            show_json(document)
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
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Keep a model of your own, as a difference to the version it was made from."""
    with opened(state_dir, may_create=True) as archive:
        from collab_core.archive.variants import save_checkpoint

        version = save_checkpoint(archive, checkpoint, parent=archive.find(parent) if parent else None)
        if tag:
            archive.tag(tag, version)
        if as_json:
            show_json({"root": version.root, "parent": version.parent, "tag": tag})
        else:
            console.print(f"Saved [bold]{escape(tag or version.root[:12])}[/bold], root {version.root}")


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
            show_json({"tag": name, "root": version.root})
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
            show_json({"root": version.root, "output": str(output), "bytes": num_bytes})
        else:
            console.print(f"{output}: {size_of(num_bytes)}, every byte checked against {version.root[:12]}.")


@app.command("verify")
def verify(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Read everything and check it. Exit code 1 if something is wrong."""
    with opened(state_dir) as archive:
        from collab_core.archive import verify as verify_archive

        num_checked, bad = verify_archive(archive)
        if as_json:
            show_json({"ok": not bad, "checked": num_checked, "bad": bad})
        else:
            console.print(f"{num_checked} versions read." if not bad else f"{num_checked} versions read, damaged:")
            for line in bad:
                console.print(f"  {escape(line)}", style="red")
        if bad:
            raise typer.Exit(1)


@app.command("size")
def size(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """What the archive takes on disk, beside what its versions would take."""
    with opened(state_dir) as archive:
        from collab_core.archive import report

        document = report.size(archive)
        if as_json:
            show_json(document)
            return
        share = "" if document["ratio"] is None else f" ({document['ratio']:.0%} of {size_of(document['raw_bytes'])})"
        console.print(f"{document['versions']} versions in {size_of(document['stored_bytes'])}{share}")


Other = Annotated[Path, typer.Argument(help="Folder of the other archive, or of a peer that has one.", metavar="DIR")]
References = Annotated[list[str] | None, typer.Argument(help="Which versions. Default: all.", metavar="REF")]


@app.command("push")
def push(to: Other, references: References = None, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Give another archive what it lacks."""
    with opened(state_dir) as archive, opened(to, may_create=True) as other:
        _move(archive, other, references, as_json=as_json)


@app.command("pull")
def pull(source: Other, references: References = None, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Get what this archive lacks from another one."""
    with opened(source) as other, opened(state_dir, may_create=True) as archive:
        _move(other, archive, references, as_json=as_json)


def _move(source: Archive, target: Archive, references: list[str] | None, *, as_json: bool) -> None:
    from collab_core.archive.transfer import transfer

    tags = source.tags()
    chosen = [source.find(reference) for reference in references] if references else list(reversed(source.versions()))
    moved = transfer(source, target, chosen)
    roots = {version.root for version in chosen}
    for name, root in tags.items():
        if root in roots and target.tags().get(name) != root:
            target.tag(name, source.find(root))
    if as_json:
        show_json({"versions": moved.versions, "bytes": moved.bytes})
    else:
        console.print(f"{moved.versions} versions moved, {size_of(moved.bytes)}.")


@app.command("gc")
def gc(
    last: Annotated[int, typer.Option(min=1, help="Keep this many of the newest.")] = 20,
    every: Annotated[list[int] | None, typer.Option(min=1, help="Keep every n-th too. [default: 10, 100]")] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Drop old versions. What has a tag, or a variant made from it, stays."""
    with opened(state_dir) as archive:
        from collab_core.archive import Keep

        dropped = archive.collect_garbage(Keep(last, tuple(every or (10, 100))))
        if as_json:
            show_json({"dropped": [version.root for version in dropped]})
        else:
            console.print(f"Dropped {len(dropped)} versions.")


def size_of(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"
