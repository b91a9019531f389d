"""What a step says of a data set, and queries on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from psg_fx.errors import BadArgument
from psg_fx.step.compiled import StepOutput
from psg_fx.step.leaves import leaves
from psg_fx.tensors import accumulation_dtype, product

Query = torch.Tensor | Mapping[str, torch.Tensor]


class Results(StepOutput):
    """The fields of a step's output for all samples of a data set: rows on the CPU in the order of the loader, sums
    over all.  `indices` `[N]` are the samples' places in the data set, where `over` was told them.
    """

    __slots__ = ()

    def __len__(self) -> int:
        return len(self.losses)

    def top(
        self, query: Query, k: int, *, block: int = 2**16, largest: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The k samples with the largest inner products with each query, and these.

        Rows are read in blocks, so that a store larger than memory can be asked.  A block is moved to the device of
        the query; products are in the wider of both dtypes, float32 or better.  A score of NaN (a sample whose
        gradient is not finite) counts as the largest, as in `torch.topk`.

        Args:
            query: `[k']` or `[Q, k']` for the projections, such as `step(x, y).projection`; or a mapping from every
                parameter's name to `[*shape]` or `[Q, *shape]` for the gradients, such as `out.mean_grad`, `out.grads`.
            k: how many.
            block: rows at a time.
            largest: False: the smallest instead.

        Returns:
            scores and indices, `[k]` or `[Q, k]`, best first.  An index is the sample's place in the loader's order,
            or in the data set where `over` was told `indices`.

        Raises:
            BadArgument: a query that does not fit what is there, or a k that is no number of samples in it.
        """
        pairs = self._pairs(query)
        if type(block) is not int or block < 1:
            raise BadArgument(
                f"block={block!r} is not a number of rows", where="top(query, k, block=...)",
                why="rows are read in blocks", fix="an int from 1 on, or leave it out",
            )  # fmt: skip
        if any(t.is_complex() for pair in pairs for t in pair):
            raise BadArgument(
                "the inner products are complex", where="top(query, k)", why="complex numbers have no order",
                fix="take the products of the rows of the results yourself, and the k best by .real or .abs()",
            )  # fmt: skip
        count = len(pairs[0][1])
        if type(k) is not int or not 0 < k <= count:
            raise BadArgument(
                f"k={k!r} is not a number of samples", where="top(query, k)", why=f"there are {count}",
                fix=f"an int from 1 to {count}",
            )  # fmt: skip
        single = all(len(q.shape) == rows.ndim - 1 for q, rows in pairs)
        queries = [((q[None] if single else q), rows) for q, rows in pairs]
        scores, places = _best(queries, k, block, largest)
        if "indices" in vars(self):
            places = self.indices[places.cpu()].to(places.device)
        return (scores[0], places[0]) if single else (scores, places)

    def _pairs(self, query: Query) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor of the query beside its rows."""
        if not isinstance(query, (torch.Tensor, Mapping)):
            raise BadArgument(
                f"the query is a {type(query).__name__}", where="top(query, k)",
                why="it is what the step gives for what is asked about",
                fix="step(x, y).projection, or a mapping such as step(x, y).grads",
            )  # fmt: skip
        field = "grads" if isinstance(query, Mapping) else "projection"
        asked = dict(leaves({field: query if field == "projection" else dict(query)}))
        kept = dict(leaves({field: vars(self)[field]})) if field in vars(self) else {}
        if not kept or set(asked) != set(kept):
            have = ", ".join(name or "" for _, name in kept) if kept else ", ".join(vars(self))
            raise BadArgument(
                f"the query is not one for {field}", where="top(query, k)",
                why=f"{field} has {have}" if kept else f"there is no {field}, only {have}",
                fix="a tensor [Q, k'] for a Projection, a mapping with every parameter's name for Grads",
            )  # fmt: skip
        pairs = [(asked[key], rows) for key, rows in kept.items()]
        counts = {len(q) if q.ndim == rows.ndim else None for q, rows in pairs}
        for (q, rows), name in zip(pairs, kept, strict=True):
            if q.shape[q.ndim - rows.ndim + 1 :] != rows.shape[1:] or q.ndim not in (rows.ndim, rows.ndim - 1):
                raise BadArgument(
                    f"the query for {name[1] or field} is {list(q.shape)}", where="top(query, k)",
                    why=f"a sample's row there is {list(rows.shape[1:])}", fix="that shape, or with a leading Q",
                )  # fmt: skip
        if len(counts) > 1:
            raise BadArgument(
                "the tensors of the query differ in their number of queries", where="top(query, k)",
                why="a leading Q is that of every parameter, or of none", fix="give all the same leading Q",
            )  # fmt: skip
        return pairs


def _best(
    queries: list[tuple[torch.Tensor, torch.Tensor]], k: int, block: int, largest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best scores of each query and their places, `[Q, k]`, from blocks of rows."""
    scores = places = None
    for start, found in _products(queries, block):
        own, at = found.topk(min(k, found.shape[1]), 1, largest)
        at = at + start
        if scores is not None and places is not None:
            own, at = torch.cat([scores, own], 1), torch.cat([places, at], 1)
            own, order = own.topk(min(k, own.shape[1]), 1, largest)
            at = at.gather(1, order)
        scores, places = own, at
    assert scores is not None
    assert places is not None
    return scores, places


def _flat(rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(len(rows), product(rows.shape[1:]))


def _products(queries: list[tuple[torch.Tensor, torch.Tensor]], block: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Start of each block of rows, and the inner products `[Q, rows]`."""
    for start in range(0, len(queries[0][1]), block):
        total: Any = 0
        for query, rows in queries:
            part = _flat(rows[start : start + block]).to(query.device)
            dtype = accumulation_dtype(torch.promote_types(query.dtype, part.dtype))
            total = total + _flat(query).to(dtype) @ part.to(dtype).T
        yield start, total
