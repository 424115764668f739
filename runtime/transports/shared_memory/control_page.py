"""The control page of a rank: where its words are, and what a barrier offers in them."""

from __future__ import annotations

from .shared_pool import MAX_SEGMENTS

Address = tuple[int, int, int]  # rank, segment, offset
Offer = Address | tuple[int, int, int, int, int]  # of two buffers: then the segment and offset of the second

# The control page of a rank, in 8-byte words, which only this rank writes. It has a slot for each peer and parity of
# the barrier's number. The number is stored last (x86-64 keeps stores in order), so that a reader of it sees the rest.
FAILED, SLEEPS_FOR, CALL = 0, 1, 2
DIRECTORY = 8
SLOTS = DIRECTORY + 2 * MAX_SEGMENTS
SLOT_WORDS = 8
NUMBER, FINGERPRINT, SEGMENT, OFFSET, SECOND_OFFSET = range(5)
NO_SEGMENT = MAX_SEGMENTS
SECOND_SEGMENT = 16  # from this bit on `SEGMENT` has the segment of a second buffer, plus 1; 0: there is none
NO_BUFFER: Address = (0, NO_SEGMENT, 0)
REFUSED = 0  # in place of a fingerprint
