"""Archives talk to each other: any peer gives the versions it has, and takes those of people it was told to trust.

Everything goes in pieces of at most a mebibyte, each asked for by itself, so a transfer survives a lost message, and
nobody holds more than a piece for a stranger. What arrives is believed only if every tensor has its hash.

library   our archive, for others
visitor   others' archives, for us
listing   what an archive tells about its versions before somebody asks for one
arrivals  what peers are giving us, until a version is complete
"""

from collab_core.library.library import Library
from collab_core.library.visitor import Visitor

__all__ = ["Library", "Visitor"]
