"""What msgpack of a peer may hold, found out before anything is built of it.

msgpack allocates what an array announces before it has read it, and nests deeper than Python can
follow; so hostile bytes are first walked: depth, number of items and announced lengths.
"""

from __future__ import annotations

from swarm.errors import WireError

MAX_DEPTH = 16
MAX_ITEMS = 1 << 16

# (bytes of the length field, what it counts): s bytes follow, a items follow, m pairs follow
_COUNTED = {
    0xC4: (1, "s"), 0xC5: (2, "s"), 0xC6: (4, "s"),
    0xD9: (1, "s"), 0xDA: (2, "s"), 0xDB: (4, "s"),
    0xDC: (2, "a"), 0xDD: (4, "a"), 0xDE: (2, "m"), 0xDF: (4, "m"),
}  # fmt: skip
_FIXED = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8,
    0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip


def check_msgpack(packed: bytes) -> None:
    """Raise WireError unless `packed` is one complete msgpack value within the limits.

    Extension types (timestamps too) and the unused byte 0xC1 are refused.
    """
    at, num_items, open_items = 0, 0, [1]  # open_items: values still to come, per nesting level
    while open_items:
        if not open_items[-1]:
            open_items.pop()
            continue
        open_items[-1] -= 1
        num_items += 1
        if at >= len(packed) or num_items > MAX_ITEMS:
            raise WireError("msgpack is cut off or has too many items")
        byte = packed[at]
        at += 1
        children = 0
        if byte < 0x80 or byte >= 0xE0:
            continue
        if byte < 0x90:
            children = 2 * (byte & 0x0F)
        elif byte < 0xA0:
            children = byte & 0x0F
        elif byte < 0xC0:
            at += byte & 0x1F
        elif byte in _FIXED:
            at += _FIXED[byte]
        elif byte in _COUNTED:
            width, kind = _COUNTED[byte]
            count = int.from_bytes(packed[at : at + width], "big")
            at += width
            if kind == "s":
                at += count
            else:
                children = count * (2 if kind == "m" else 1)
        else:
            raise WireError("msgpack holds a type that is not allowed")
        if children:
            if children > len(packed) - at or len(open_items) >= MAX_DEPTH:
                raise WireError("msgpack is cut off or nested too deep")
            open_items.append(children)
    if at != len(packed):
        raise WireError("msgpack is cut off or followed by other bytes")
