"""Packs rows of different lengths into fewer sequences, so that slots after a row's last response token cost nothing.

A *place* is one of a sequence's T positions, where a token is read and the row's next token is predicted. A row of L
slots takes L - 1 places, and no token attends to another row's. Sequences are processed in pieces, and pieces that hold
nothing are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.core.taps import Taps
from jaxaudit.learners.dialogue.rollout import Rows

EMPTY = -1
"""The index that stands for no slot or no place."""


@struct.dataclass
class Sequences:
    """What a transformer reads and predicts, int32 `[S, T]`.

    Attributes:
      tokens, position, attention_start: inputs, as `gpt2.apply` takes them.
      target: the next token of the same row.
    """

    tokens: Any
    position: Any
    attention_start: Any
    target: Any


@struct.dataclass
class Packed:
    """N rows of T slots in N sequences, of which the first `used` ones hold something.

    Attributes:
      sequences: `[N, T]`.
      slot: index of the rows' N T slots that each place predicts, int32 `[N, T]`; `EMPTY` at empty places.
      place: index of the N T places that predicts each slot, int32 `[N, T]`; `EMPTY` at slots that are not predicted.
      used: number of sequences that hold something, int32.
    """

    sequences: Sequences
    slot: Any
    place: Any
    used: Any

    def piece(self, begin: Any, size: int) -> PackedPiece:
        """Returns `size` sequences from the index `begin` on."""
        sequences, slot = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, begin, size), (self.sequences, self.slot)
        )
        slots = self.slot.shape[1]
        within = self.place - begin * slots
        return PackedPiece(sequences, slot, jnp.where((within >= 0) & (within < size * slots), within, EMPTY))


@struct.dataclass
class PackedPiece:
    """Some of the sequences, `[S, T]`, with the places of all rows' slots, `[N, T]`.

    Attributes:
      sequences: `[S, T]`.
      slot: as in `Packed`, `[S, T]`.
      place: as in `Packed`, counted within this piece; `EMPTY` for slots that other pieces predict.
    """

    sequences: Sequences
    slot: Any
    place: Any

    @property
    def slot_mask(self) -> jax.Array:
        """Whether this piece predicts each slot: bool `[N, T]`."""
        return self.place != EMPTY

    def unpack(self, values: jax.Array) -> jax.Array:
        """Returns values of places, `[S, T]`, by slot, `[N, T]`; 0 at slots that this piece does not predict."""
        return _gather(values.reshape(-1), self.place.reshape(-1), self.slot.reshape(-1)).reshape(self.place.shape)


def arrange(rows: Rows, loss_mask: jax.Array, share_sequences: bool) -> Packed:
    """Returns rows packed into shared sequences, or each in a sequence of its own: `pack` or `keep_separate`."""
    return pack(rows, loss_mask) if share_sequences else keep_separate(rows)


def pack(rows: Rows, loss_mask: jax.Array) -> Packed:
    """Packs each row up to its last slot in `loss_mask`, bool `[N, T]`; rows without such a slot take no place.

    The longest rows go first, each into the first sequence with room for it ("first fit decreasing", which needs at
    most 11/9 of the fewest sequences; Johnson, 1973).
    """
    count, slots = loss_mask.shape
    lengths = jnp.max(jnp.where(loss_mask, jnp.arange(slots), 0), axis=1)  # the last slot's index: the places it takes

    def put(room: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        fits = jnp.argmax(room >= length)
        return room - jnp.where(jnp.arange(count) == fits, length, 0), fits * slots + slots - room[fits]

    longest_first = jnp.argsort(-lengths, stable=True)
    room, begins = jax.lax.scan(put, jnp.full(count, slots), lengths[longest_first])
    begin = jnp.zeros(count, jnp.int32).at[longest_first].set(begins.astype(jnp.int32), unique_indices=True)
    return _lay_out(rows, begin, lengths, jnp.sum(room < slots))


def keep_separate(rows: Rows) -> Packed:
    """Returns each row in a sequence of its own."""
    count, slots = rows.tokens.shape
    return _lay_out(rows, jnp.arange(count) * slots, jnp.full(count, slots - 1), jnp.int32(count))


def _lay_out(rows: Rows, begin: jax.Array, lengths: jax.Array, used: jax.Array) -> Packed:
    """Lays out rows that begin at the places `begin` `[N]` of N T and take `lengths` `[N]` places each."""
    count, slots = rows.tokens.shape
    places = jnp.arange(count * slots)
    order = jnp.argsort(jnp.where(lengths > 0, begin, count * slots))
    latest = jnp.searchsorted(jnp.where(lengths > 0, begin, count * slots)[order], places, side="right") - 1
    row = order[jnp.maximum(latest, 0)]
    offset = places - begin[row]
    taken = (latest >= 0) & (offset >= 0) & (offset < lengths[row])
    source = jnp.where(taken, row * slots + offset, 0)

    def by_place(x: jax.Array, empty: Any) -> jax.Array:
        return jnp.where(taken, x, empty).reshape(count, slots)

    inputs = rows.tokens, rows.position, rows.attention_start
    tokens, position, attention_start = (x.reshape(-1)[source] for x in inputs)
    column = places % slots
    sequences = Sequences(
        tokens=by_place(tokens, 0),
        position=by_place(position, 0),
        attention_start=by_place(column - offset + attention_start, column),
        target=by_place(rows.tokens.reshape(-1)[source + taken], 0),
    )
    slot = jnp.arange(slots)
    place = jnp.where((slot >= 1) & (slot <= lengths[:, None]), begin[:, None] + slot - 1, EMPTY)
    return Packed(sequences, by_place(source + 1, EMPTY), place, used)


@dataclass(frozen=True)
class PieceSizes:
    """Numbers of sequences in pieces, which divide all sequences without a remainder.

    Attributes:
      first: size of the first piece, which is always processed.
      later: size of each later piece, which is processed if it holds something.
    """

    first: int
    later: int

    @classmethod
    def half_then_eighths(cls, sequences: int) -> PieceSizes:
        """Returns a first piece of about half of the sequences, and later pieces of an eighth each.

        Fewer pieces take less time, and smaller ones waste less.
        """
        later = -(-sequences // 8)
        return cls(sequences - sequences // 2 // later * later, later)


def sum_over_pieces(packed: Packed, sizes: PieceSizes, function: Callable[[Taps, PackedPiece], Any], taps: Taps) -> Any:
    """Returns the sum of `function(taps, piece)`, a pytree of arrays, over the pieces that hold something."""
    total = function(taps, packed.piece(0, sizes.first))
    if sizes.first == packed.slot.shape[0]:
        return total

    def add(taps: Taps, total: Any, number: jax.Array) -> Any:
        piece = packed.piece(sizes.first + number * sizes.later, sizes.later)
        return jax.tree.map(jnp.add, total, function(taps, piece))

    left = jnp.maximum(packed.used - sizes.first, 0)
    return taps.repeat(add, total, -(-left // sizes.later))


def apply(packed: Packed, sizes: PieceSizes, function: Callable[[Sequences], Any]) -> Any:
    """Returns `function(sequences)`, arrays `[S, T]`, by slot, `[N, T]`; 0 at slots that are not predicted."""
    return sum_over_pieces(
        packed, sizes, lambda _, piece: jax.tree.map(piece.unpack, function(piece.sequences)), Taps()
    )


@jax.custom_vjp
def _gather(values: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns `values[index]`, and 0 where the index is `EMPTY`.

    `inverse` is the inverse index, so that the gradient is a gather, too, and not a scatter, which XLA's CPU backend
    does entry by entry.
    """
    return _gather_forward(values, index)


def _gather_forward(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.where(index == EMPTY, 0, values[jnp.maximum(index, 0)])


_gather.defvjp(
    lambda values, index, inverse: (_gather_forward(values, index), inverse),
    lambda inverse, cotangent: (_gather_forward(cotangent, inverse), None, None),
)
