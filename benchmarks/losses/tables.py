"""The suite's answers as tables: how good, at what cost, and how long it takes to be as good."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.losses.arms import Arm
from benchmarks.losses.results import Result, interval
from benchmarks.losses.text import make_task


def tables_of(results: Sequence[Result], data: str) -> str:
    """Of one text."""
    if not results:
        return f"{data}: not trained yet"
    return f"{_losses(results, data)}\n\n{_costs(results)}"


def _losses(results: Sequence[Result], data: str) -> str:
    floor = make_task(data, 0).floor
    ddp = next(result for result in results if result.arm.kind == "ddp")
    plain = {result.arm.local_steps: result for result in results if result.arm.name.startswith("diloco none")}
    headings = [data, "seeds", "steps", "H", "inner lr", "loss"]
    headings += ["over the floor"] if floor is not None else []
    rows = [[*headings, "% above DDP", "% above diloco none, same H"]]
    for result in results:
        arm = result.arm
        row = [
            arm.name,
            f"{len(result.finals)}",
            f"{arm.num_steps}",
            _rhythm(arm),
            f"{arm.lr:g}",
            interval(result.finals),
        ]
        if floor is not None:
            row.append(interval([loss - floor for loss in result.finals]))
        rows.append([*row, *(interval(result.relative_to(other), 2) for other in (ddp, plain[arm.local_steps]))])
    return markdown(rows)


def _costs(results: Sequence[Result]) -> str:
    ddp = next(result for result in results if result.arm.kind == "ddp")
    target = target_of(results)
    slowest = ddp.seconds_to(target)
    headings = ["arm", "kB per step", "× fewer than DDP", "s per step", f"steps to {target:.3f}", "minutes to it"]
    rows = [[*headings, "DDP takes ×"]]
    for result in results:
        cost, steps, seconds = result.cost, result.steps_to(target), result.seconds_to(target)
        rows.append(
            [
                result.arm.name,
                f"{cost.num_bytes / 1e3:.1f}",
                f"{ddp.cost.num_bytes / cost.num_bytes:.0f}" if cost.num_bytes else "–",
                f"{cost.seconds:.3f}{'' if cost.is_measured else ' (computed)'}",
                "never" if steps is None else f"{steps:.0f}",
                "–" if seconds is None else f"{seconds / 60:.1f}",
                "–" if seconds is None or slowest is None else f"{slowest / seconds:.1f}",
            ]
        )
    return markdown(rows)


def target_of(results: Sequence[Result]) -> float:
    """What our arm for slow links has reached when it is done; of all arms, if it was not trained yet."""
    ours = [result.loss for result in results if result.arm.overlap]
    return min(ours or [max(result.loss for result in results)])


def sweep_table(sweep: Sequence[tuple[Arm, float]]) -> str:
    """The first one is what the others are compared with."""
    reference = sweep[0][1]
    rows = [["codec", "H", "outer lr", "outer momentum", "loss", "% above DDP"]]
    for arm, loss in sweep:
        outer = [f"{arm.outer_lr:g}", f"{arm.momentum:g}"] if arm.kind == "diloco" else ["–", "–"]
        rows.append(
            [
                _codec(arm),
                _rhythm(arm),
                *outer,
                f"{loss:.3f}",
                f"{100 * (loss / reference - 1):.1f}",
            ]
        )
    return markdown(rows)


def markdown(rows: list[list[str]]) -> str:
    lined = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in lined)


def _codec(arm: Arm) -> str:
    if arm.kind != "diloco":
        return "DDP"
    return f"{arm.codec}, {arm.keep} of 4096" if arm.codec == "topk" else arm.codec


def _rhythm(arm: Arm) -> str:
    return "–" if arm.kind == "alone" else f"{arm.steps_per_epoch}"
