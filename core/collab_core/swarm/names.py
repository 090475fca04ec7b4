"""Friendly names: everyone derives the same `quiet-otter` from the same peer ID."""

from __future__ import annotations

from blake3 import blake3

MAX_LABELS = 2000

ADJECTIVES = """
amber ample bold brave breezy bright brisk calm candid cheery civil clear clever cosy crisp curious daring deft eager
early easy fair fancy fleet fond frank free fresh gentle glad golden grand green happy hardy honest humble jolly keen
kind light lively loyal lucky mellow merry mild modest neat nimble noble patient plucky polite proud quick quiet ready
rosy silver smart snug spry steady sunny swift tidy upbeat vivid warm wise witty young zesty
"""
ANIMALS = """
badger bat bear beaver bee bison boar bream camel cat cheetah civet cod condor coot coyote crab crane cricket crow deer
dingo dolphin dove duck eagle egret elk falcon ferret finch fox frog gecko gibbon goat goose grouse gull hare hawk hen
heron hippo horse ibex ibis jackal jay kestrel kite kiwi koala lark lemur lion llama lynx magpie marten mole moose mouse
newt ocelot oriole osprey otter owl panda perch pika puffin puma quail rabbit raven robin salmon seal shrew skink sloth
sparrow squid stoat stork swan swift tapir tern tiger toad trout turtle viper vole walrus weasel whale wolf wombat wren
yak zebra
"""


def friendly_name(peer_id: str) -> str:
    """A name for people. Not unique: the peer ID stays the identity."""
    adjectives, animals = ADJECTIVES.split(), ANIMALS.split()
    digest = blake3(peer_id.encode()).digest()
    adjective = adjectives[int.from_bytes(digest[:4], "big") % len(adjectives)]
    animal = animals[int.from_bytes(digest[4:8], "big") % len(animals)]
    return f"{adjective}-{animal}"


class Labels:
    """What peers are called in a log, the same from their first to their last line.

    That is their name; whoever comes later to a name that is in use has the end of its ID with it.
    """

    def __init__(self) -> None:
        self._given: dict[str, tuple[str, str]] = {}

    def of(self, peer_id: str, name: str | None) -> str:
        """The label of a peer; without a name, of one that left or that we know nothing of."""
        known = self._given.pop(peer_id, None)
        if known is None or name not in (None, known[0]):
            name = name or friendly_name(peer_id)
            is_taken = name in (label for _, label in self._given.values())
            known = name, f"{name}-{peer_id[-4:]}" if is_taken else name
        self._given[peer_id] = known  # last in the row of those to be forgotten
        if len(self._given) > MAX_LABELS:
            del self._given[next(iter(self._given))]
        return known[1]
