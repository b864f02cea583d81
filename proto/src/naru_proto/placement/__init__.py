"""Which workers hold which models: one algorithm for everybody who decides it. Pure: no clock, no I/O.

Called by the operator's plans, by the routers' keeper and on a cold model's request: from the same facts all of them
come to the same placement, so that they never pull in two directions. How a copy gets to its worker is not decided
here.
"""

from naru_proto.placement.choose import choose_load
from naru_proto.placement.defragment import CopyMove, Defragmentation, defragment
from naru_proto.placement.drift import DriftLine, drift
from naru_proto.placement.facts import copy_bytes, read_labels, served, slots_of, want_of
from naru_proto.placement.model import (
    Choice,
    Held,
    HeldState,
    Near,
    PlacedCopy,
    Placement,
    Unplaced,
    Want,
    WorkerSlot,
)
from naru_proto.placement.place import place

__all__ = [
    "Choice",
    "CopyMove",
    "Defragmentation",
    "DriftLine",
    "Held",
    "HeldState",
    "Near",
    "PlacedCopy",
    "Placement",
    "Unplaced",
    "Want",
    "WorkerSlot",
    "choose_load",
    "copy_bytes",
    "defragment",
    "drift",
    "place",
    "read_labels",
    "served",
    "slots_of",
    "want_of",
]
