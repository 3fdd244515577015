"""The lean decoder's key-value cache: prompts once per group of rows, sampled tokens per row."""

import torch
from torch import Tensor

# Of the free memory of a GPU; the rest is for the passes, and for the layer whose cache grows.
SHARE = 0.8
# Tokens where free memory is not asked for.
ON_CPU = 1 << 19


class GroupCache:
    """Cache of one batch: prompts once per entry, sampled tokens per row.

    An entry is a prompt with room for `members` rows, so attention to prompts is one matrix product per entry and key
    head. Each layer has tensors of its own, so that what grows or shrinks is there twice for one layer at a time.

    Args:
        lengths: int64 [P], tokens of each prompt.
        group: int64 [B], prompt of each row.
        room: most sampled tokens per row.
        layers, heads, dim: number of layers, of key heads H, and the size D of a head.
        like: a tensor of the cache's dtype, on its device.
    """

    def __init__(
        self, lengths: Tensor, group: Tensor, room: int, layers: int, heads: int, dim: int, like: Tensor
    ) -> None:
        self._prompt, place, self._members = entries_of(group)
        self.prompt_columns = int(lengths.max())
        self.positions = lengths[group]  # int64 [B], of each row's next token
        self.filled = 0  # tokens that every row has sampled
        entries = len(self._prompt)
        # Zeros, because a masked weight of 0 times uninitialised memory could be NaN.
        self.keys = [like.new_zeros(entries, heads, dim, self.prompt_columns) for _ in range(layers)]
        self.values = [like.new_zeros(entries, heads, self.prompt_columns, dim) for _ in range(layers)]
        self.mask: Tensor | None = None  # additive [E, columns] where prompts are of different lengths
        if int(lengths.min()) < self.prompt_columns:
            padding = torch.arange(self.prompt_columns, device=like.device) >= lengths[self._prompt][:, None]
            self.mask = like.new_zeros(padding.shape).masked_fill_(padding, torch.finfo(like.dtype).min)
        self._room = room
        self._capacity = 0
        self._heads = torch.arange(heads, device=like.device)
        self._keys = [like.new_empty(len(place), heads, dim, 0) for _ in range(layers)]
        self._values = [like.new_empty(len(place), heads, 0, dim) for _ in range(layers)]
        self._set_places(place)

    def store(self, prompts: Tensor, layer: int, keys: Tensor, values: Tensor) -> None:
        """Copies keys and values [U, H, T, D] of prompts, int64 [U], into their entries."""
        targets, source = (self._prompt[:, None] == prompts).nonzero(as_tuple=True)
        length = keys.shape[2]
        self.keys[layer][targets, :, :, :length] = keys.transpose(2, 3)[source]
        self.values[layer][targets, :, :length] = values[source]

    def _set_places(self, place: Tensor) -> None:
        self._place = place
        entry = place // self._members
        member = place % self._members
        heads = len(self._heads)
        # Indices from entry order [E, H, M] to row-and-head order [B, H] and back; empty places repeat row 0.
        self._from_entries = ((entry[:, None] * heads + self._heads) * self._members + member[:, None]).reshape(-1)
        back = place.new_zeros(len(self.keys[0]) * heads * self._members)
        back[self._from_entries] = torch.arange(len(self._from_entries), device=place.device)
        self._from_rows = back

    def to_entries(self, rows: Tensor, shared: int) -> Tensor:
        """[B · H, shared · X] → [E · H, M · shared, X]."""
        return rows.index_select(0, self._from_rows).view(-1, self._members * shared, rows.shape[1] // shared)

    def to_rows(self, entries: Tensor) -> Tensor:
        """[E · H, M · shared, X] → [B · H, shared · X]."""
        return entries.view(len(self._from_rows), -1).index_select(0, self._from_entries)

    def append_column(self) -> None:
        """Makes room for one more token per row."""
        if self.filled == self._capacity:
            self._capacity = min(self._room, max(64, 2 * self.filled))
            rows = len(self._place)
            for n, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
                heads, dim = keys.shape[1:3]
                self._keys[n] = keys.new_empty(rows, heads, dim, self._capacity)
                self._keys[n][..., : self.filled] = keys[:rows, ..., : self.filled]
                self._values[n] = values.new_empty(rows, heads, self._capacity, dim)
                self._values[n][..., : self.filled, :] = values[:rows, :, : self.filled]
        self.filled += 1

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the newest column, keys and values [B, H, D]; returns all: [B · H, D, filled], [B · H, filled, D]."""
        all_keys = self._keys[layer][: len(keys)]
        all_values = self._values[layer][: len(keys)]
        all_keys[..., self.filled - 1] = keys
        all_values[:, :, self.filled - 1] = values
        return all_keys[..., : self.filled].flatten(0, 1), all_values[:, :, : self.filled].flatten(0, 1)

    def keep(self, index: Tensor) -> None:
        """See `Decoder.keep`. Entries without rows go once they are half of all."""
        # Rows that stay in place are not copied.
        moved = (index != torch.arange(len(index), device=index.device)).nonzero()[:, 0]
        source = index[moved]
        for keys, values in zip(self._keys, self._values, strict=True):
            keys[moved, ..., : self.filled] = keys[source, ..., : self.filled]
            values[moved, :, : self.filled] = values[source, :, : self.filled]
        self.positions = self.positions[index]
        place = self._place[index]
        # Prompts whose rows have all ended would still take part in the matrix products.
        used = torch.bincount(place // self._members, minlength=len(self.keys[0])) > 0
        if 2 * int(used.sum()) <= len(used):
            for n in range(len(self.keys)):
                self.keys[n] = self.keys[n][used]
                self.values[n] = self.values[n][used]
            self.mask = None if self.mask is None else self.mask[used]
            place = (used.cumsum(0) - 1)[place // self._members] * self._members + place % self._members
        self._set_places(place)


def tokens_in_free_memory(bytes_per_token: int, device: torch.device) -> int:
    """Tokens whose keys and values fit into `SHARE` of what is free on a CUDA device; `ON_CPU` on others.

    What this process has freed but keeps for later tensors is free too.
    """
    if device.type != "cuda" or not bytes_per_token:
        return ON_CPU
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(1, int(SHARE * (free + kept)) // bytes_per_token)


def entries_of(group: Tensor) -> tuple[Tensor, Tensor, int]:
    """Cuts the rows of each prompt into entries of M rows.

    Args:
        group: int64 [B], prompt of each row.

    Returns:
        prompt of each entry [E]; entry · M + member of each row [B]; M, which weighs reading a prompt's cache against
        empty places.
    """
    counts = torch.bincount(group)
    sizes = sorted({1, 2, 4, 8, 16, 32, 64} | {c for c in counts.tolist() if 0 < c <= 64})
    cost = {m: int(((counts + m - 1) // m).sum()) * (1 + m / 16) for m in sizes}
    members = min(sizes, key=lambda m: cost[m])
    entries = (counts + members - 1) // members
    first = torch.cumsum(entries, 0) - entries
    order = torch.argsort(group, stable=True)
    rank = torch.empty_like(group)
    rank[order] = torch.arange(len(group), device=group.device) - (torch.cumsum(counts, 0) - counts)[group[order]]
    entry_prompt = torch.repeat_interleave(torch.arange(len(counts), device=group.device), entries)
    return entry_prompt, (first[group] + rank // members) * members + rank % members, members
