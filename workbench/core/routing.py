"""Route tables: which experts a token id goes to in a layer, from the ids alone.

V vocabulary, E experts, K routes of a token, C hash channels, n ids of one chunk.

No corpus, no seed of a run and no global random state is looked at: equal arguments give equal
tables, on every machine. The hashes are exact unsigned 64-bit arithmetic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Strategy = Literal[
    "modulo_cyclic", "round_robin", "random", "token_id_balanced_hash", "token_id_multi_hash"
]

ROUTING_SEED = 0xC0DE
"""Where every seed and hash key of a table starts, whatever the seed of the run."""

CHANNELS = 3
"""Hash channels that vote in `token_id_multi_hash`."""
CHUNK_SCORES = 2**15
"""Scores [E, n] computed at once: small enough for the second-level cache of a core."""
MAX_EXPERTS = 2**15 - 1
"""The largest number of experts that the int16 of a table can name."""
_RANDOM, _BALANCED, _MULTI = 1, 2, 3  # First parts of keys: strategies share no hash.

U64 = NDArray[np.uint64]


def route_table(
    strategy: Strategy, vocab_size: int, experts: int, top_k: int, layer: int
) -> Tensor:
    """The K distinct experts of every token id in a layer, the primary first: [K, V] int16, CPU.

    Raises:
        ValueError: an unknown strategy, or sizes for which there is no table.
    """
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"experts is {experts}; it must be from 1 to {MAX_EXPERTS}")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}; with {experts} experts it must be from 1 to {experts}")
    if not 1 <= vocab_size < 2**32:
        raise ValueError(f"vocab_size is {vocab_size}; it must be at least 1 and below 2**32")
    if layer < 0:
        raise ValueError(f"layer is {layer}; it must not be negative")
    match strategy:
        case "modulo_cyclic":
            return modulo_cyclic(vocab_size, experts, top_k, layer)
        case "round_robin":
            return _cyclic(torch.arange(vocab_size, device="cpu"), experts, top_k)
        case "random":
            return torch.from_numpy(_random(vocab_size, experts, top_k, layer))
        case "token_id_balanced_hash":
            return torch.from_numpy(_balanced_hash(vocab_size, experts, top_k, layer))
        case "token_id_multi_hash":
            return torch.from_numpy(_multi_hash(vocab_size, experts, top_k, layer))
    raise ValueError(f"strategy is {strategy!r}; it must be one of {', '.join(get_args(Strategy))}")


def tables_sha256(tables: Sequence[Tensor]) -> str:
    """Hash of the tables in their order, by shape and value, whatever integers hold them."""
    digest = hashlib.sha256()
    for table in tables:
        digest.update(f"{tuple(table.shape)}".encode())
        digest.update(table.cpu().to(torch.int64).numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def modulo_cyclic(vocab_size: int, experts: int, top_k: int, layer: int) -> Tensor:
    """A token's first expert is `permutation[id mod E]`, the k-th one (first + k) mod E: [K, V]."""
    generator = torch.Generator(device="cpu").manual_seed(ROUTING_SEED + layer)
    permutation = torch.randperm(experts, generator=generator, device="cpu")
    return _cyclic(permutation[torch.arange(vocab_size, device="cpu") % experts], experts, top_k)


def _cyclic(first: Tensor, experts: int, top_k: int) -> Tensor:
    """first [V] -> [K, V]: an expert, modulo E, and the ones after it."""
    steps = torch.arange(top_k, device="cpu")[:, None]
    return ((first + steps) % experts).to(torch.int16)


def hash64(key: int | U64, index: U64) -> U64:
    """Output number `index`, from 0, of the generator SplitMix64 seeded with `key`; they broadcast.

    Its state is key + (index + 1) * 0x9E3779B97F4A7C15 (Steele, Lea and Flood 2014); the output
    function is Stafford's variant 13 of the MurmurHash3 finaliser. For one key it is a bijection of
    the index, for one index a bijection of the key.
    """
    start = np.uint64(key) if isinstance(key, int) else key
    x: U64 = start + (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@cache
def _key(*parts: int) -> int:
    key = ROUTING_SEED
    for part in parts:
        key = int(hash64(key, np.array([part], dtype=np.uint64))[0])
    return key


def _random(vocab_size: int, experts: int, top_k: int, layer: int) -> NDArray[np.int16]:
    """An ordered choice of K experts for every id, independent and uniform (to E / 2^32): [K, V].

    Fisher and Yates's shuffle, stopped after K places; draw k of an id is its hash of (layer, k).
    """
    table = np.empty((top_k, vocab_size), dtype=np.int16)
    for span, ids in _chunks(vocab_size, experts):
        column = np.arange(len(ids))
        pool = np.repeat(np.arange(experts, dtype=np.int16)[:, None], len(ids), axis=1)
        for k in range(top_k):
            draw = hash64(_key(_RANDOM, layer, k), ids) >> np.uint64(32)
            place = k + ((draw * np.uint64(experts - k)) >> np.uint64(32)).astype(np.int64)
            table[k, span] = pool[place, column]
            pool[place, column] = pool[k]
    return table


def _balanced_hash(vocab_size: int, experts: int, top_k: int, layer: int) -> NDArray[np.int16]:
    """Experts dealt out along the ids, ranked by a 32-bit hash of (id, layer), ties by id: [K, V].

    The primary expert is rank mod E. The further ones follow it at distances from 1 to E - 1 that
    step on every E ranks, so that a primary expert meets all others. Within E ranks from a multiple
    of E each row names every expert once: its counts differ by at most 1.
    """
    ids = np.arange(vocab_size, dtype=np.uint64)
    high = hash64(_key(_BALANCED, layer), ids) & np.uint64(0xFFFFFFFF00000000)
    ranked = np.sort(high | ids) & np.uint64(0xFFFFFFFF)
    deal, primary = np.divmod(np.arange(vocab_size), experts)
    table = np.empty((top_k, vocab_size), dtype=np.int16)
    table[0, ranked] = primary
    for k in range(1, top_k):
        table[k, ranked] = (primary + 1 + (deal + k - 1) % (experts - 1)) % experts
    return table


def channel_scores(ids: U64, experts: int, layer: int, channel: int) -> U64:
    """How a channel ranks experts for ids [n], the highest score first: [E, n].

    A score depends on (id, layer, channel, expert), not on E (rendezvous hashing, Thaler and
    Ravishankar 1998): a new expert takes ids over, and no id moves between the old ones. The scores
    of an id never tie, since experts differ in their keys.
    """
    keys = hash64(_key(_MULTI, layer, channel), np.arange(experts, dtype=np.uint64))
    return hash64(keys[:, None], ids)


def _multi_hash(vocab_size: int, experts: int, top_k: int, layer: int) -> NDArray[np.int16]:
    """The K experts with the most points from C channels: [K, V].

    Each channel gives its first expert K points, its second K - 1, its K-th 1, the others none (a
    Borda count cut off at K; for K = 1, the most votes). Equal points are ordered by the sum of the
    channels' scores (their high 30 bits), equal sums by the lower expert.

    A new expert leaves alone every id for which no channel has it among its first K: it has no
    points there, all others keep theirs, and at least K of them have some. An id that a channel
    gives to it may also change among the old experts, unlike under one channel.
    """
    table = np.empty((top_k, vocab_size), dtype=np.int16)
    # Low 15 bits of a ballot: higher for a lower expert, never 0. Above them 32 bits of summed
    # scores, then the points, at most C * K < 2^17.
    low = np.arange(MAX_EXPERTS, MAX_EXPERTS - experts, -1, dtype=np.uint64)[:, None]
    for span, ids in _chunks(vocab_size, experts):
        ballot = np.zeros((experts, len(ids)), dtype=np.uint64)
        for channel in range(CHANNELS):
            scores = channel_scores(ids, experts, layer, channel)
            ballot += scores >> np.uint64(34)
            for k in range(top_k):
                won = scores == scores.max(axis=0)
                ballot += won * np.uint64((top_k - k) << 32)
                scores *= ~won
        ballot = (ballot << np.uint64(15)) | low
        for k in range(top_k):
            best = ballot.max(axis=0)
            table[k, span] = MAX_EXPERTS - (best & np.uint64(MAX_EXPERTS)).astype(np.int64)
            ballot *= ballot != best
    return table


def _chunks(vocab_size: int, experts: int) -> Iterator[tuple[slice, U64]]:
    """The ids in order, in pieces [n] for which [E, n] stays small."""
    size = max(64, CHUNK_SCORES // experts)
    for start in range(0, vocab_size, size):
        stop = min(start + size, vocab_size)
        yield slice(start, stop), np.arange(start, stop, dtype=np.uint64)
