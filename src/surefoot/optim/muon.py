"""Muon: momentum, orthogonalised matrix by matrix (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from surefoot.config.optim import Muon
from surefoot.optim.clip import local_part
from surefoot.optim.elementwise import Elementwise, before_decay, wide
from surefoot.optim.newton_schulz import orthogonalise, product_cost
from surefoot.optim.optimizer import Setting, Update
from surefoot.optim.rounding import round_stochastically
from surefoot.parallel.boxes import box_of
from surefoot.parallel.exchange import MatrixExchange, peers_of

CHUNK = 1 << 22
"""Elements per rank that are worked on at once: what an update needs in memory beside the state is a few times as many numbers."""
MATRICES = 2
"""Of the largest, that the elements worked on at once leave room for per rank where several share the work, so that none is idle."""
SIZE = 0.2
"""Root mean square of an update per unit of rate, about that of AdamW's (arXiv:2502.16982 section 2.2)."""


class MuonRule:
    """Of the gradient g, weight w (out, in), rate r and decay d, with N the Newton-Schulz iteration:

        m <- momentum m + g;   u = g + momentum m (nesterov, else m);   w <- (1 - r d) w - r 0.2 sqrt(max(out, in)) N(u)

    (the last is arXiv:2502.16982 eq. 4). torch.optim.Muon keeps the running mean, (1 - momentum) m: N does not see the factor, but in the
    floor under the norm of u. Where weights or momentum are bf16 all is computed in fp32 and rounded stochastically; the momentum acts
    as it is kept.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: Mapping[str, Setting],
        config: Muon,
        *,
        narrow_moments: bool,
        replicas: int = 1,
    ) -> None:
        """``replicas``: ranks that hold plain parameters alike and step together, each working on its share of the matrices; 1 works on
        all by itself. Raises ValueError for a parameter that is neither a matrix nor a stack of them. Collective over the mesh of the
        parameters."""
        self._rows = {name: _matrix_rows(name, p, settings[name]) for name, p in parameters.items()}
        self.memory = Elementwise(parameters, settings, ("momentum",), narrow_moments=narrow_moments)
        self.parameters, self.config, self.beta2 = self.memory.parameters, config, math.nan
        self.kind: str = config.kind
        self._peers = peers_of(list(self.parameters.values()), replicas=replicas)
        self._moved = frozenset(self.parameters)
        """What the last applied update moved."""
        self._fresh = False
        """Whether gradients that are there are those of the last applied update."""
        self._exchanges: dict[tuple[str, ...], MatrixExchange] = {}

    def tensors(self) -> dict[str, Tensor]:
        return self.memory.tensors()

    def step_count(self) -> Tensor:
        return self.memory.step_count()

    def set_step_count(self, step: int) -> None:
        self.memory.steps = step
        self._moved, self._fresh = frozenset(self.parameters), False

    @torch.no_grad()
    def apply(self, update: Update) -> None:
        """The host reads ``skip``; gradients are divided by ``scale`` in place."""
        before = self.memory.steps
        names = self.memory.begin(update)
        self._fresh = self.memory.steps > before
        if not self._fresh:
            return
        self._moved = frozenset(names)
        for chunk in self._chunks(names):
            self._remember(chunk, update)
            for name, direction in zip(chunk, self._directions(chunk), strict=True):
                self._move(name, direction, update)

    @torch.no_grad()
    def last_updates(self, names: Sequence[str], lr: float) -> list[Tensor]:
        """With nesterov from the gradients of that update too: NaN where they are gone, or another update was refused since. The stochastic
        rounding of weights is left out."""
        weights = dict(zip(names, (wide(local_part(self.parameters[name])) for name in names), strict=True))
        if not self._is_known(names):
            return [torch.full_like(weight, math.nan) for weight in weights.values()]
        moved = [name for name in names if name in self._moved]
        updates = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for name, direction in zip(moved, self._directions(moved), strict=True):
            rate = lr * self.memory.settings[name].lr
            decay = rate * self.memory.settings[name].weight_decay
            updates[name] = before_decay(direction.mul_(-rate), weights[name], decay)
        return list(updates.values())

    def second_moments(self, names: Sequence[str]) -> None:
        return None

    def _is_known(self, names: Sequence[str]) -> bool:
        """Whether all that made the last applied update is still there."""
        if not self.config.nesterov or not self.memory.steps:
            return self.memory.steps > 0
        return self._fresh and all(self.parameters[name].grad is not None for name in names if name in self._moved)

    def _remember(self, names: Sequence[str], update: Update) -> None:
        """The gradients enter the momentum."""
        for name in names:
            stored = local_part(self.memory.moments["momentum"][name])
            values = wide(stored).mul_(self.config.momentum).add_(self._gradient(name))
            self._keep(values, stored, name, "momentum", update)

    def _directions(self, names: Sequence[str]) -> list[Tensor]:
        """What a step takes off the weights per unit of rate, decay aside: local parts, new tensors. Collective."""
        if not names:
            return []
        momenta = [wide(local_part(self.memory.moments["momentum"][name])) for name in names]
        if self.config.nesterov:
            beta = self.config.momentum
            momenta = [m.mul(beta).add_(self._gradient(name)) for name, m in zip(names, momenta, strict=True)]
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.config.newton_schulz]
        if momenta[0].dtype == torch.float64:
            dtype = torch.float64
        exchange = self._exchange(names)
        results = orthogonalise(exchange.gather(momenta), self.config.newton_schulz_steps, dtype)
        sizes = [SIZE * math.sqrt(max(matrix.stop - matrix.start, matrix.columns)) for matrix in exchange.matrices]
        return exchange.spread(results, sizes, momenta, dtype)

    def _gradient(self, name: str) -> Tensor:
        """As this rank holds it, in full width."""
        gradient = self.parameters[name].grad
        assert gradient is not None
        return wide(local_part(gradient))

    def _move(self, name: str, direction: Tensor, update: Update) -> None:
        stored, setting = local_part(self.parameters[name]), self.memory.settings[name]
        rate = update.lr * setting.lr
        values = wide(stored).mul_(1.0 - rate * setting.weight_decay).sub_(direction, alpha=rate)
        self._keep(values, stored, name, "weights", update)

    def _keep(self, values: Tensor, stored: Tensor, name: str, purpose: str, update: Update) -> None:
        """Write back what was computed in a copy, in full width; what is stored so was changed where it lies."""
        if stored.dtype != torch.bfloat16:
            return
        round_stochastically(
            values,
            stored,
            seed=update.seed,
            batch_index=update.batch_index,
            purpose=purpose,
            name=name,
            box=box_of(self.parameters[name]),
        )

    def _exchange(self, names: Sequence[str]) -> MatrixExchange:
        """How the matrices of these parameters are shared out."""
        key = tuple(names)
        if key not in self._exchanges:
            tensors, rows = [self.parameters[name] for name in names], [self._rows[name] for name in names]
            self._exchanges[key] = MatrixExchange(tensors, rows, product_cost, self._peers)
        return self._exchanges[key]

    def _chunks(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Names, some at a time, by the size of whole tensors: the same on every rank, and more of them the more ranks share the work."""
        ranks = self._peers.size
        largest = max(max(self._rows[name]) * self.parameters[name].shape[-1] for name in self.parameters)
        limit = ranks * max(CHUNK, MATRICES * largest if ranks > 1 else 0)
        chunk: list[str] = []
        for name in names:
            if chunk and sum(self.parameters[other].numel() for other in (*chunk, name)) > limit:
                yield chunk
                chunk = []
            chunk.append(name)
        if chunk:
            yield chunk


def _matrix_rows(name: str, parameter: Tensor, setting: Setting) -> tuple[int, ...]:
    """Rows of each matrix of a parameter, all dims but the last taken as rows."""
    shape = tuple(parameter.shape)
    if setting.rows and (parameter.ndim != 2 or sum(setting.rows) != shape[0]):
        raise ValueError(f"{name} of shape {shape} does not stack matrices of {setting.rows} rows")
    if parameter.ndim == 2:
        return setting.rows or shape[:1]
    if parameter.ndim == 3:
        return shape[1:2] * shape[0]
    raise ValueError(
        f"{name} of shape {shape} has the role {setting.role}, whose parameters Muon moves: matrices (out, in) or stacks of them "
        "(experts, out, in); give it another role in the roles() of its part"
    )
