"""Rows of different lengths in fewer sequences: what stands after a row's last own token costs nothing.

A *place* is one of a sequence's T, where a token is read and the row's next one is predicted; a row of L slots takes
L - 1 of them, and no token sees those of another row. Sequences are worked off in pieces, as many as hold something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.core.taps import Taps
from jaxaudit.learners.dialogue.rows import Rows

NOWHERE = -1
"""In an index: nothing is there."""


@struct.dataclass
class Sequences:
    """What a transformer reads and is to predict, int32 `[S, T]`.

    Attributes:
      tokens, position, first: as `gpt2.apply` takes them.
      target: the token that its row has next.
    """

    tokens: Any
    position: Any
    first: Any
    target: Any


@struct.dataclass
class Packed:
    """N rows of T slots in sequences, of which the first ones hold something.

    Attributes:
      sequences: `[N, T]`.
      slot: which of the rows' N T slots is predicted at each place, int32 `[N, T]`; `NOWHERE` at empty places.
      place: where each slot is predicted, int32 `[N, T]`; `NOWHERE` where it is not asked for.
      used: how many sequences hold something, int32.
    """

    sequences: Sequences
    slot: Any
    place: Any
    used: Any

    def piece(self, begin: Any, size: int) -> PackedPiece:
        """So many sequences from the one with a number on."""
        sequences, slot = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, begin, size), (self.sequences, self.slot)
        )
        slots = self.slot.shape[1]
        within = self.place - begin * slots
        return PackedPiece(sequences, slot, jnp.where((within >= 0) & (within < size * slots), within, NOWHERE))


@struct.dataclass
class PackedPiece:
    """Some of the sequences, `[S, T]`, with all rows' slots `[N, T]`.

    Attributes:
      sequences: `[S, T]`.
      slot: as in `Packed`.
      place: as in `Packed`, counted in this piece; `NOWHERE` of slots that are in another.
    """

    sequences: Sequences
    slot: Any
    place: Any

    @property
    def here(self) -> jax.Array:
        """Whether a slot is predicted in this piece: bool `[N, T]`."""
        return self.place != NOWHERE

    def back(self, values: jax.Array) -> jax.Array:
        """What was found at places, `[S, T]`, by slots, `[N, T]`; 0 at slots that are not here."""
        return _moved(values.reshape(-1), self.place.reshape(-1), self.slot.reshape(-1)).reshape(self.place.shape)


def arranged(rows: Rows, own: jax.Array, shared: bool) -> Packed:
    """Rows in sequences that they share, or each in one of its own: `packed` or `unpacked`."""
    return packed(rows, own) if shared else unpacked(rows)


def packed(rows: Rows, own: jax.Array) -> Packed:
    """Rows, each up to its last slot that is `own`, bool `[N, T]`; rows without any take no place.

    The longest go first, each into the first sequence with room for it ("first fit decreasing", which needs at most
    11/9 of the fewest sequences; Johnson, 1973).
    """
    count, slots = own.shape
    lengths = jnp.max(jnp.where(own, jnp.arange(slots), 0), axis=1)  # the last slot's number: the places it takes

    def put(room: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        fits = jnp.argmax(room >= length)
        return room - jnp.where(jnp.arange(count) == fits, length, 0), fits * slots + slots - room[fits]

    longest_first = jnp.argsort(-lengths, stable=True)
    room, begins = jax.lax.scan(put, jnp.full(count, slots), lengths[longest_first])
    begin = jnp.zeros(count, jnp.int32).at[longest_first].set(begins.astype(jnp.int32), unique_indices=True)
    return _laid(rows, begin, lengths, jnp.sum(room < slots))


def unpacked(rows: Rows) -> Packed:
    """Each row in a sequence of its own."""
    count, slots = rows.tokens.shape
    return _laid(rows, jnp.arange(count) * slots, jnp.full(count, slots - 1), jnp.int32(count))


def _laid(rows: Rows, begin: jax.Array, lengths: jax.Array, used: jax.Array) -> Packed:
    """Rows `[N]`, which begin at some places, `[N]` of N T, and take so many of them, `[N]`."""
    count, slots = rows.tokens.shape
    places = jnp.arange(count * slots)
    order = jnp.argsort(jnp.where(lengths > 0, begin, count * slots))
    latest = jnp.searchsorted(jnp.where(lengths > 0, begin, count * slots)[order], places, side="right") - 1
    row = order[jnp.maximum(latest, 0)]
    offset = places - begin[row]
    taken = (latest >= 0) & (offset >= 0) & (offset < lengths[row])
    read = jnp.where(taken, row * slots + offset, 0)

    def at(x: jax.Array, otherwise: Any) -> jax.Array:
        return jnp.where(taken, x, otherwise).reshape(count, slots)

    tokens, position, first = (x.reshape(-1)[read] for x in (rows.tokens, rows.position, rows.first))
    here = places % slots
    sequences = Sequences(
        tokens=at(tokens, 0),
        position=at(position, 0),
        first=at(here - offset + first, here),
        target=at(rows.tokens.reshape(-1)[read + taken], 0),
    )
    slot = jnp.arange(slots)
    place = jnp.where((slot >= 1) & (slot <= lengths[:, None]), begin[:, None] + slot - 1, NOWHERE)
    return Packed(sequences, at(read + 1, NOWHERE), place, used)


@dataclass(frozen=True)
class Sizes:
    """How many sequences there are in a piece.

    Attributes:
      first: in the first one, which is always worked off.
      later: in each one after it, which is worked off if it holds something. They come out even.
    """

    first: int
    later: int

    @classmethod
    def halved(cls, sequences: int) -> Sizes:
        """Half of so many at once, the rest in eighths: fewer pieces take less time, smaller ones waste less."""
        later = -(-sequences // 8)
        return cls(sequences - sequences // 2 // later * later, later)


def total(packed: Packed, sizes: Sizes, found: Callable[[Taps, PackedPiece], Any], taps: Taps) -> Any:
    """`found(taps, piece)`, arrays, added up over the pieces that hold something."""
    so_far = found(taps, packed.piece(0, sizes.first))
    if sizes.first == packed.slot.shape[0]:
        return so_far

    def add(taps: Taps, so_far: Any, number: jax.Array) -> Any:
        piece = packed.piece(sizes.first + number * sizes.later, sizes.later)
        return jax.tree.map(jnp.add, so_far, found(taps, piece))

    left = jnp.maximum(packed.used - sizes.first, 0)
    return taps.repeat(add, so_far, -(-left // sizes.later))


def read(packed: Packed, sizes: Sizes, what: Callable[[Sequences], Any]) -> Any:
    """What is found at places, `what(sequences)`, arrays `[S, T]`, by slots, `[N, T]`; 0 where it is not asked for."""
    return total(packed, sizes, lambda _, piece: jax.tree.map(piece.back, what(piece.sequences)), Taps())


@jax.custom_vjp
def _moved(values: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """`values[index]`, 0 where it is `NOWHERE`. `inverse` is the other way, so that the gradient is an index, too, and
    no scatter, which XLA's CPU backend does entry by entry."""
    return _indexed(values, index)


def _indexed(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.where(index == NOWHERE, 0, values[jnp.maximum(index, 0)])


_moved.defvjp(
    lambda values, index, inverse: (_indexed(values, index), inverse),
    lambda inverse, cotangent: (_indexed(cotangent, inverse), None, None),
)
