"""Square (Andriushchenko et al. 2020): a random search by squares that asks for logits alone, with AutoAttack's settings.

Each query changes one square of every image and keeps the change where the margin falls. An image leaves the batch when
the exact model is wrong about it. In Linf the squares do not depend on the answers, so that small batches are filled with
the next squares of each image; the answers after a change that is kept are asked for again.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deat.evaluation.attacks import confirm_fooled, count_queries_at_once
from deat.evaluation.fast_model import FastModel
from deat.tasks.classification import as_class_logits
from deat.threat import ThreatModel
from deat.utils.torch_contexts import broadcast_mask

FIRST_SHARE = 0.8
"""The share of the pixels that the first squares cover."""
SHARE_HALVES_AFTER = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""The queries after which squares become half as large."""
MAX_WASTED_SHARE = 0.05
"""About what share of the queries ahead may be asked again, because an earlier one changed the image."""
DRAWN_AT_ONCE = 64
"""How many squares are drawn before the first of them is needed."""
GRID = 5
"""How many patterns the first example of L2 and L1 has along each side."""


@dataclass(frozen=True)
class Square:
    """Square with the margin as its loss.

    Attributes:
        queries: How often each image is asked about.
    """

    queries: int = 5000

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, generator: torch.Generator
    ) -> Tensor:
        """Attack images that are classified correctly.

        Args:
            model: Network that returns logits. No gradients are taken.
            x: Images (B, C, H, W) in [0, 1].
            y: Their labels.
            threat: The ball.
            generator: Source of squares, on the CPU.

        Returns:
            For each image the example with the smallest margin found.
        """
        search = (_BlockSearch if threat.name == "linf" else _MassSearch)(model, x, y, threat, generator)
        with torch.no_grad():
            return search.run(self.queries)


def _window_share(query: int) -> float:
    return FIRST_SHARE * 0.5 ** sum(query > limit for limit in SHARE_HALVES_AFTER)


class _Search:
    """A search that asks about one change of every image at a time."""

    min_side, is_odd = 1, False

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, generator: torch.Generator) -> None:
        self.model, self.threat, self.generator = model, threat, generator
        # A fast model copies images into this order, and only a square changes between two queries.
        self.order = torch.channels_last if isinstance(model, FastModel) else torch.contiguous_format
        self.x = x.contiguous(memory_format=self.order)
        self.y, self.rows = y, torch.arange(len(x), device=x.device)
        self.result, self.margin = x.clone(), torch.full((len(x),), math.inf, device=x.device)

    def run(self, queries: int) -> Tensor:
        """Search until every image is misclassified or the queries are used up."""
        self.best = self._first_examples().contiguous(memory_format=self.order)
        margin = self._ask(self.best)
        self.margin = margin
        is_left = self._is_left(margin <= 0)
        self._search(is_left, queries)
        self.result[self.rows] = self.best
        return self.result

    def _search(self, is_left: Tensor, queries: int) -> None:
        """Change the images that are left until none is, or the queries are used up."""
        for query in range(queries):
            if not is_left.any():
                break
            if not is_left.all():
                self._select(is_left)
            if self._can_look_ahead():
                self._look_ahead(query, queries)
                break
            is_left = self._is_left(self._improve(self._side(query)))

    def _can_look_ahead(self) -> bool:
        """Whether a batch has room for the next changes of each image, and these do not depend on the answers."""
        return False

    def _look_ahead(self, query: int, queries: int) -> None:
        """Try the other changes, several of each image in a batch."""
        raise NotImplementedError

    def _first_examples(self) -> Tensor:
        """Where the search starts."""
        raise NotImplementedError

    def _improve(self, side: int) -> Tensor:
        """Try one change of every image; return which images the queried model misclassifies now."""
        raise NotImplementedError

    def _side(self, query: int) -> int:
        height, width = self.x.shape[2:]
        side = max(round(math.sqrt(_window_share(query) * height * width)), self.min_side)
        return min(side + (self.is_odd and side % 2 == 0), height, width)

    def _ask(self, x_adv: Tensor, num_each: int = 1) -> Tensor:
        """The logit of the label minus the largest other one, for several examples of each image after each other."""
        logits = as_class_logits(self.model(x_adv)).clone()
        y = self.y.repeat_interleave(num_each)[:, None]
        own = logits.gather(1, y).squeeze(1)
        return own - logits.scatter_(1, y, -math.inf).amax(1)

    def _is_left(self, claimed: Tensor) -> Tensor:
        """Which images are still to be fooled, by the exact model."""
        if not claimed.any():
            return torch.ones_like(claimed)
        return ~confirm_fooled(self.model, self.best, self.y, claimed)

    def _select(self, is_left: Tensor) -> None:
        """Remove the images that are misclassified from the search."""
        out = ~is_left
        self.result[self.rows[out]] = self.best[out]
        self.y, self.rows, self.margin = (values[is_left] for values in (self.y, self.rows, self.margin))
        self.x, self.best = (values[is_left].contiguous(memory_format=self.order) for values in (self.x, self.best))

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def _signs(self, *shape: int) -> Tensor:
        return (2 * self._rand(*shape) - 1).sign().to(self.x.device)

    def _place(self, side: int) -> tuple[slice, slice]:
        """The rows and columns of a square at a random place."""
        top, left = (int(float((size - side) * self._rand(1))) for size in self.x.shape[2:])
        return slice(top, top + side), slice(left, left + side)


class _BlockSearch(_Search):
    """The search in Linf: a square of one colour of size eps."""

    def _can_look_ahead(self) -> bool:
        """Whether a batch has room for more than one square of each image."""
        return self._count_queries_at_once() > 1

    def _count_queries_at_once(self) -> int:
        return count_queries_at_once(self.model, len(self.y), len(self.result))

    def _look_ahead(self, query: int, queries: int) -> None:
        """Try the other squares; each image goes on at the one after the last that changed it."""
        self.next_query, self.first_drawn = torch.full_like(self.y, query), query
        self.places, self.signs = self.y.new_zeros(0, 3), self._signs(0, self.x.shape[1])
        self.kept_share = 1.0
        is_left = torch.ones_like(self.y, dtype=torch.bool)
        while is_left.any():
            if not is_left.all():
                self.next_query = self.next_query[is_left]
                self._select(is_left)
            num_each = max(1, min(self._count_queries_at_once(), int(2 * MAX_WASTED_SHARE / self.kept_share)))
            is_left = self._is_left(self._improve_ahead(num_each, queries)) & (self.next_query < queries)

    def _first_examples(self) -> Tensor:
        """Stripes of size eps."""
        count, channels, _, width = self.x.shape
        return (self.x + self.threat.eps * self._signs(count, channels, 1, width)).clamp(0, 1)

    def _improve(self, side: int) -> Tensor:
        """Try one square; return which images the queried model misclassifies now."""
        window, eps = (slice(None), slice(None), *self._place(side)), self.threat.eps
        x, before = self.x[window], self.best[window].clone()
        after = before + 2 * eps * self._signs(self.x.shape[1], 1, 1)
        after = torch.minimum(torch.maximum(after, x - eps), x + eps).clamp_(0, 1)
        self.best[window] = after
        margin = self._ask(self.best)
        is_better = (margin < self.margin) | (margin <= 0)
        self.best[window] = torch.where(broadcast_mask(is_better, after), after, before)
        self.margin = torch.where(is_better, margin, self.margin)
        return is_better & (margin <= 0)

    def _improve_ahead(self, num_each: int, queries: int) -> Tensor:
        """Try the next squares of each image and keep the first that helps; return which images are misclassified now."""
        count, device = len(self.y), self.y.device
        query = self.next_query[:, None] + torch.arange(num_each, device=device)
        first_query, last_query = (min(int(bound), queries - 1) for bound in torch.stack(query.aminmax()).tolist())
        self._draw_squares(last_query + 1)
        shape = count * num_each, *self.x.shape[1:]
        examples = torch.empty(shape, dtype=self.x.dtype, device=device, memory_format=self.order)
        examples.view(count, num_each, *self.x.shape[1:]).copy_(self.best[:, None])
        largest_side = self._side(first_query)  # sides never grow
        self._change_squares(examples, num_each, query.clamp(max=queries - 1).flatten(), largest_side)
        margin = self._ask(examples, num_each).view(count, num_each)
        helps = ((margin < self.margin[:, None]) | (margin <= 0)) & (query < queries)
        is_kept, first = helps.any(1), helps.int().argmax(1)
        rows = is_kept.nonzero().squeeze(1)
        self.best[rows] = examples[rows * num_each + first[rows]]
        self.margin[rows] = margin[rows, first[rows]]
        self.next_query = self.next_query + torch.where(is_kept, first + 1, num_each)
        self.kept_share = 0.9 * self.kept_share + 0.1 * len(rows) / (count * num_each)
        claimed: Tensor = is_kept & (self.margin <= 0)
        return claimed

    def _draw_squares(self, count: int) -> None:
        """Draw at least the squares of the first queries: top rows, left columns, sides, and the signs of their channels."""
        places, signs, drawn = [], [], self.first_drawn + len(self.places)
        for query in range(drawn, max(count, drawn + DRAWN_AT_ONCE) if count > drawn else drawn):
            side = self._side(query)
            rows, columns = self._place(side)
            places.append((rows.start, columns.start, side))
            signs.append(self._signs(1, self.x.shape[1]))
        if places:
            self.places = torch.cat((self.places, self.places.new_tensor(places)))
            self.signs = torch.cat((self.signs, *signs))

    def _change_squares(self, examples: Tensor, num_each: int, query: Tensor, largest_side: int) -> None:
        """Change the square of a query in each example, in place."""
        place = query - self.first_drawn
        top, left, side = (values[:, None] for values in self.places[place].T)
        # All squares are indexed as the largest; a smaller one repeats its last row and column.
        offset = torch.arange(largest_side, device=side.device).minimum(side - 1)
        rows, columns = (top + offset)[:, :, None], (left + offset)[:, None, :]
        example = torch.arange(len(examples), device=side.device)[:, None, None]
        before, x = examples[example, :, rows, columns], self.x[example // num_each, :, rows, columns]
        eps = self.threat.eps
        after = before + 2 * eps * self.signs[place][:, None, None, :]
        examples[example, :, rows, columns] = torch.minimum(torch.maximum(after, x - eps), x + eps).clamp_(0, 1)


class _MassSearch(_Search):
    """The search in L2 and L1: the size of the change moves from one square to another."""

    min_side, is_odd = 3, True

    def _first_examples(self) -> Tensor:
        """A grid of patterns, scaled to the radius."""
        count, channels, height, width = self.x.shape
        side = height // GRID
        edge = (height - side * GRID) // 2
        delta = torch.zeros_like(self.x)
        for row in range(height // side):
            for column in range(width // side):
                top, left = edge + row * side, edge + column * side
                delta[:, :, top : top + side, left : left + side] += self._pattern(side) * self._signs(
                    count, channels, 1, 1
                )
        return self._into_ball(self.x, delta)

    def _improve(self, side: int) -> Tensor:
        """Move the change of one square to another; return which images the queried model misclassifies now."""
        to, source = (slice(None), slice(None), *self._place(side)), (slice(None), slice(None), *self._place(side))
        delta, eps = self.best - self.x, self.threat.eps
        count, channels = delta.shape[:2]
        both = torch.zeros_like(delta)
        both[to] = both[source] = 1
        free = eps**self.power - self._mass(delta).sum(1, keepdim=True)
        pattern = self._pattern(side) * self._signs(count, channels, 1, 1)
        pattern = pattern + delta[to] / (1e-12 + self._size(delta[to]))
        budget = free.clamp(min=0) / channels + self._mass(delta * both)
        if self.power == 1:
            budget = budget * channels
        pattern = pattern / (1e-12 + self._size(pattern)) * budget ** (1 / self.power)
        delta[source] = 0
        delta[to] = pattern
        x_adv = self._into_ball(self.x, delta)
        margin = self._ask(x_adv)
        is_better = (margin < self.margin) | (margin <= 0)
        self.best = torch.where(broadcast_mask(is_better, x_adv), x_adv, self.best)
        self.margin = torch.where(is_better, margin, self.margin)
        return is_better & (margin <= 0)

    @property
    def power(self) -> int:
        """2 in L2, where sizes add up by their squares, and 1 in L1."""
        return 2 if self.threat.name == "l2" else 1

    def _mass(self, values: Tensor) -> Tensor:
        """The sum of powers of each channel, (B, C, 1, 1)."""
        return values.abs().pow(self.power).sum((-2, -1), keepdim=True)

    def _size(self, values: Tensor) -> Tensor:
        return self._mass(values) ** (1 / self.power)

    def _into_ball(self, x: Tensor, delta: Tensor) -> Tensor:
        """In L2 the change scaled to the radius and clipped, in L1 its projection."""
        if self.threat.name == "l1":
            return x + self.threat.project(x, delta)
        length = broadcast_mask(delta.square().flatten(1).sum(1).sqrt(), delta)
        return (x + delta / (length + 1e-12) * self.threat.eps).clamp(0, 1)

    def _pattern(self, side: int) -> Tensor:
        """Two bumps of opposite signs, above each other or side by side, of size 1."""
        delta = torch.cat((self._bump(side // 2, side), -self._bump(side - side // 2, side)))
        delta = delta / self._size(delta)
        return (delta.T if float(self._rand(1)) > 0.5 else delta).to(self.x.device)

    def _bump(self, height: int, width: int) -> Tensor:
        """A hill of nested rectangles, of size 1."""
        delta = torch.zeros(height, width)
        top, left = height // 2, width // 2
        for ring in range(max(height // 2 + 1, width // 2 + 1)):
            rows, columns = (slice(max(first - ring, 0), first + ring + 1) for first in (top, left))
            delta[rows, columns] += 1.0 / (ring + 1) ** (2 if self.power == 2 else 4)
        return delta / self._size(delta)
