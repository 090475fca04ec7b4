"""`collab sample`: text from the model as it is now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from collab_cli import options
from collab_cli.failures import errors_in_words
from collab_cli.guest import visit
from collab_cli.lines import EventLines
from collab_cli.stopping import Stopping
from collab_cli.terminal import Terminal, print_json
from collab_core.errors import Code, ConfigError, StateError

if TYPE_CHECKING:
    import threading

    from collab_core.session import Session
    from collab_core.state.replica import Replica

NUM_TOKENS = 120


def sample(
    run: Annotated[str, typer.Argument(help="The run's invite, or its folder with --initial-peers.", metavar="INVITE")],
    prompt: Annotated[str | None, typer.Option(help="How the text begins. Default: whatever the task shows.")] = None,
    num_tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, max=10_000, help="How many tokens follow. Default: 120.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=10, help="0 always takes the likeliest token. Default: 0.7.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Another seed, another text. Default: 0.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    initial_peers: options.InitialPeers = None,
    verbose: options.Verbose = False,
) -> None:
    """Let the model speak: fetch what the run has now, and go on with a text. Nobody sees you."""
    with errors_in_words(verbose=verbose), Stopping() as stopping:
        err = Terminal(stderr=True)
        source = options.read_source(run)
        how = {"--tokens": num_tokens, "--temperature": temperature, "--seed": seed}
        if prompt is None and (given := [option for option, value in how.items() if value is not None]):
            raise ConfigError(
                Code.BAD_OPTION,
                f"{' and '.join(given)} can only be used with --prompt.",
                fix="Say how the text begins, for example --prompt 'The '.",
            )
        with err.status("Asking the swarm…"):
            from collab_core.session import with_assets
            from collab_trainer import load_task, new_replica
            from collab_trainer.generating import TEMPERATURE, Generation, can_complete
        with visit(source, initial_peers) as looking:
            session = with_assets(looking)
            lines = EventLines(err)
            lines.hidden = frozenset({"peer_joined", "peer_left"})
            session.events.listen(lines)
            settings = session.manifest.settings
            task = load_task(settings.task, options.task_context(source, session))
            if prompt is not None and not can_complete(task):
                raise ConfigError(
                    Code.BAD_OPTION,
                    f"The task of this run, {settings.task.name}, does not go on with a text, so --prompt has no use.",
                    fix="Leave --prompt out, to see what the task shows of its model.",
                )
            model = task.build_model()
            replica = new_replica(settings, model)
            take_state(session, replica, stopping.when_asked())
            stopping.at_once()
            replica.layout.write(model, replica.values)
        generation = Generation(
            num_tokens=num_tokens or NUM_TOKENS,
            temperature=TEMPERATURE if temperature is None else temperature,
            seed=seed or 0,
        )
        complete = getattr(task, "complete", None)
        text = task.sample(model) if prompt is None or complete is None else complete(model, prompt, generation)
        if as_json:
            print_json({"run_id": session.manifest.run_id, "epoch": replica.epoch, "text": text})
        else:
            err.print(f"[dim]{settings.name}, epoch {replica.epoch}[/dim]")
            print(text)


def take_state(session: Session, replica: Replica, stop: threading.Event) -> None:
    """Make the replica what the run has now."""
    from collab_core.holding import Holding
    from collab_core.outlook import Outlook

    if session.manifest.settings.strategy.name == "gossip":
        raise ConfigError(
            Code.BAD_OPTION,
            "In a gossip run every trainer has a model of its own.",
            fix="Take one with `collab models recover` on a machine that trained.",
        )
    outlook = Outlook(session.swarm, session.manifest)
    session.swarm.look_around(lambda: bool(outlook.others()), stop)
    holding = Holding(
        session,
        replica,
        outlook,
        backup_every=0,
        on_change=lambda epoch: None,
        stop=stop,
    )
    holding.begin()
    holding.announce()
    holding.catch_up("looking")
    if stop.is_set():
        raise KeyboardInterrupt
    if not outlook.others() and replica.epoch == 0:
        raise StateError(
            Code.NO_STATE,
            "Nobody is in the run, and no checkpoint of it was found.",
            fix="Try again when somebody trains: collab status INVITE",
        )
