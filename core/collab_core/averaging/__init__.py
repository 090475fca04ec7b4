"""Exact all-reduce: matchmaking from peer records, one flat vector, the same bytes for everyone."""

from collab_core.averaging.averager import ExactAverager
from collab_core.averaging.codecs import CODECS, Codec
from collab_core.averaging.faults import FailAt
from collab_core.averaging.link import Bandwidth
from collab_core.averaging.round import RoundOutcome, RoundRequest

__all__ = ["CODECS", "Bandwidth", "Codec", "ExactAverager", "FailAt", "RoundOutcome", "RoundRequest"]
