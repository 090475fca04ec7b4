"""A good guest: leaves in time, remembers what it gave, takes no more memory than there is."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
import torch

from collab_cli.time_limit import MARGIN_S, time_limit
from collab_core.contribution import Contribution, ContributionBook
from collab_core.errors import Code, TaskError
from collab_core.memory import is_out_of_memory
from collab_core.run.settings import OptimizerSettings, RunSettings, StrategySettings
from collab_core.state.layout import Layout
from collab_core.telemetry import EventLog
from collab_trainer.ladder import Ladder
from collab_trainer.task import Batch, Block
from collab_trainer.tiny_gpt import TinyGPT, TinyGPTOptions
from collab_trainer.tuning import Trial, best_batch, largest_batch, try_batches
from collab_trainer.work import Gradients, LocalSteps

CPU = torch.device("cpu")
HOUR = 3600.0


def test_a_volunteers_hours_and_a_notebooks_limit_are_met_in_time() -> None:
    assert time_limit(None, {}, 0) is None
    given = time_limit(2, {}, 0)
    assert given is not None
    assert 0 < 2 * HOUR - given.seconds <= 10
    kaggle, colab = {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, {"COLAB_RELEASE_TAG": "release-colab"}
    for environ, name, length in (
        (kaggle, "Kaggle", 12),
        ({**kaggle, "TPU_WORKER_ID": "0"}, "Kaggle", 9),
        (colab, "Colab", 12),
    ):
        limit = time_limit(None, environ, 5 * HOUR)
        assert limit is not None
        assert limit.seconds == (length - 5) * HOUR - MARGIN_S
        assert limit.reason == f"a session of {name} ends after {length} hours"
        sooner = time_limit(1, environ, 5 * HOUR)
        assert sooner is not None
        assert sooner.reason == "--hours 1"
    last = time_limit(None, kaggle, 12 * HOUR - 60)
    assert last is not None
    assert last.seconds == 30
    assert time_limit(None, colab, 20 * HOUR) is None  # one that lasts longer than we know


def test_a_session_began_with_the_first_process_here() -> None:
    since = time.time() - psutil.Process(1).create_time()
    limit = time_limit(None, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"})
    if since > 11 * HOUR:
        assert limit is None or limit.seconds < HOUR
    else:
        assert limit is not None
        assert limit.seconds == pytest.approx(12 * HOUR - MARGIN_S - since, abs=10)


def test_an_account_belongs_to_a_key_and_a_run_and_survives_damage(tmp_path: Path) -> None:
    key, other = tmp_path / "identity.key", tmp_path / "other.key"
    book = ContributionBook(key, "run")
    for samples in (32, 0, 64):
        book.add(samples)
    book.save()
    again = ContributionBook(key, "run")
    assert again.before == Contribution(samples=96, epochs=2, seconds=book.total.seconds)
    again.add(4)
    assert (again.now.samples, again.total.samples, again.total.epochs) == (4, 100, 3)
    again.remember(50)
    assert again.total.samples == 100
    again.remember(500)  # a backup of a time before there were accounts
    assert again.total.samples == 504
    elsewhere = ContributionBook(key, "another run")
    elsewhere.add(1)
    elsewhere.save()
    assert ContributionBook(key, "run").before.samples == 96
    assert ContributionBook(other, "run").before == Contribution()
    for junk in (b"", b"[]", b'{"run": {"samples": -1}}', b'{"run": {"samples": 1, "more": 2}}', b'{"run": 7}'):
        (tmp_path / "identity.contribution.json").write_bytes(junk)
        assert ContributionBook(key, "run").before == Contribution()


def linear() -> tuple[torch.nn.Module, Layout]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    return model, Layout.of(model)


PLAIN = OptimizerSettings(name="sgd", lr=0.1, clip_norm=0, weight_decay=0)
"""A step of Adam would hardly tell how large a gradient was."""


@pytest.mark.parametrize("kind", ["gradients", "steps"])
def test_a_batch_in_pieces_gives_what_the_whole_batch_gives(kind: str, tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    told: list[dict[str, object]] = []
    events.listen(told.append)
    batch = {"x": torch.randn(10, 3, generator=torch.Generator().manual_seed(1))}
    results = []
    for limit in (10, 3):
        model, layout = linear()
        work = Gradients(model, layout) if kind == "gradients" else LocalSteps(model, layout, PLAIN)
        work.begin(0)
        sizes: list[int] = []

        def one_pass(rows: Batch, limit: int = limit, sizes: list[int] = sizes) -> None:
            if len(rows["x"]) > limit:
                torch.empty(2**60, dtype=torch.uint8)  # as large as no machine has it
            sizes.append(len(rows["x"]))
            work.took(model(rows["x"]).square().mean(), len(rows["x"]), 10)  # noqa: B023

        ladder = Ladder(CPU, events)
        while not ladder.climb(batch, one_pass):
            assert work.drop_step() is (kind == "gradients")
            sizes.clear()
        assert sizes == ([10] if limit == 10 else [3, 3, 3, 1])
        work.end_step()
        out = torch.zeros(layout.num_values)
        work.collect(layout.fragments(1)[0], layout.read(linear()[0]), 10, out)
        results.append(out)
    assert torch.allclose(*results, atol=1e-6)
    assert [(event["rows"], event["next_rows"]) for event in told] == [(10, 5), (5, 3)]


def test_where_not_one_row_fits_it_ends_in_words_and_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    ladder = Ladder(CPU, EventLog(tmp_path / "events.jsonl"))

    def greedy(rows: Batch) -> None:
        torch.empty(2**60, dtype=torch.uint8)

    batch = {"x": torch.zeros(2, 3)}
    assert not ladder.climb(batch, greedy)
    with pytest.raises(TaskError) as caught:
        ladder.climb(batch, greedy)
    assert caught.value.code is Code.OUT_OF_MEMORY

    def wrong(rows: Batch) -> None:
        torch.zeros(2) @ torch.zeros(3)

    with pytest.raises(RuntimeError, match="size"):
        ladder.climb(batch, wrong)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_smallest_batch_that_is_about_as_fast_as_the_fastest_is_taken() -> None:
    assert best_batch([Trial(1, 10.0), Trial(2, 19.0), Trial(4, 20.0), Trial(8, 0.0)]) == 2
    assert best_batch([Trial(1, 0.0)]) == 1
    assert largest_batch(RunSettings(name="r", strategy=StrategySettings(target_batch_size=256))) == 64
    assert largest_batch(RunSettings(name="r", strategy=StrategySettings(name="diloco"))) == 32


class Slow(TinyGPT):
    """As slow and as hungry as a test wants."""

    sample_s, max_rows = 0.0, 2**30

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        num_rows = len(batch["tokens"])
        if num_rows > self.max_rows:
            torch.empty(2**60, dtype=torch.uint8)
        time.sleep(num_rows * self.sample_s)
        return super().loss(model, batch)


def test_batches_are_tried_upwards_and_downwards_only_where_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    options = TinyGPTOptions(layers=1, width=8, heads=1, sequence_length=16)
    task = Slow(seed=0, options=options)
    model = task.build_model()
    before = Layout.of(model).read(model)
    rows = {"tokens": task.samples(Block(0, 0))["tokens"][:3]}

    def sizes(largest: int) -> list[int]:
        return [trial.batch_size for trial in try_batches(task, model, rows, CPU, largest)]

    assert sizes(4) == [4]
    assert sizes(12)[0] == 8
    task.max_rows = 3
    trials = list(try_batches(task, model, rows, CPU, 64))
    assert [(trial.batch_size, trial.samples_per_second > 0) for trial in trials] == [(8, False), (4, False), (2, True)]
    assert best_batch(trials) == 2
    monkeypatch.setattr("collab_trainer.tuning.MAX_PASS_S", 0.2)
    task.max_rows, task.sample_s = 2**30, 0.05
    first, *_, last = sizes(64)
    assert first == 8
    assert last < 8
    assert torch.equal(before, Layout.of(model).read(model))
    assert all(parameter.grad is None for parameter in model.parameters())
