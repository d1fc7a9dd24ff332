"""Speeds that nobody measured, from measured ones: a tree of Gaussian vectors in log space.

Every node is the vector of a thing's log speeds over all accelerator types, as a deviation from what is known
without measuring (a formula, or data-sheet rates):

    all classes ── family ── class ── row (class, shape, mode, power cap) ── reports, one type each

A child differs from its parent by a Gaussian step whose covariance over the types is learned, one per level,
by expectation-maximisation from a weak prior. So a report moves its own cell most, then the row's other types
as far as types move together, then the class's other shapes, the family, and everything else, ever less. The
first reports of a type on which nothing ran yet move that type for all classes. Exact, closed form, linear in
rows, no random numbers: the same evidence gives the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Name = TypeVar("Name", str, tuple[str, bool])

ITERATIONS = 5
"""Rounds of expectation-maximisation; most of the change happens in the first few."""
PRIOR_WEIGHT = 6.0
"""The prior of a level's covariance counts like this many observed steps."""


@dataclass(frozen=True, slots=True)
class LevelPrior:
    """Prior standard deviations of one level: of all types together, and of each type by itself."""

    level: float
    own: float

    def covariance(self, types: int) -> Floats:
        return self.level**2 * np.ones((types, types)) + self.own**2 * np.eye(types)


@dataclass(frozen=True, slots=True)
class Prior:
    """How wrong the starting point may be, from the root down: all classes, family, class, row."""

    steps: tuple[LevelPrior, LevelPrior, LevelPrior, LevelPrior]


FORMULA_PRIOR = Prior(
    (LevelPrior(0.4, 0.35), LevelPrior(0.2, 0.2), LevelPrior(0.15, 0.15), LevelPrior(0.1, 0.1))
)
"""Rows for which `busbar.scheduler.fit` has a formula."""
DATA_SHEET_PRIOR = Prior(
    (LevelPrior(3.0, 0.7), LevelPrior(1.0, 0.35), LevelPrior(0.7, 0.25), LevelPrior(0.25, 0.15))
)
"""Rows of which only the accelerators' data sheets are known: the unit of speed itself is unknown."""


@dataclass(frozen=True)
class Observed:
    """The observations, in rows: the tree by parent numbers, deviations and their precision (0: not
    observed)."""

    class_of: Ints
    """Class of each row."""
    family_of: Ints
    """Family of each class."""
    deviations: Floats
    precision: Floats


@dataclass(frozen=True)
class Posterior:
    """Mean and standard deviation of every row's deviation on every type."""

    mean: Floats
    deviation: Floats


Covariances = tuple[Floats, Floats, Floats, Floats]


def learn(observed: Observed, prior: Prior) -> Covariances:
    """Covariance of every level, root first; the root's stays its prior."""
    types = observed.deviations.shape[1]
    priors = tuple(step.covariance(types) for step in prior.steps)
    found: Covariances = (priors[0], priors[1], priors[2], priors[3])
    for _ in range(ITERATIONS):
        _, moments = _infer(observed, found)
        fresh = [
            (PRIOR_WEIGHT * expected + total) / (PRIOR_WEIGHT + count)
            for expected, (total, count) in zip(priors[1:], moments, strict=True)
        ]
        found = (priors[0], fresh[0], fresh[1], fresh[2])
    return found


def posterior(observed: Observed, covariances: Covariances) -> Posterior:
    """Mean and deviation of every cell, measured or not, given the evidence."""
    return _infer(observed, covariances)[0]


def number(names: Sequence[Name]) -> Ints:
    """Each name's number in sorted order."""
    known = {name: i for i, name in enumerate(sorted(set(names)))}
    return np.array([known[name] for name in names], np.int64)


Moments = tuple[tuple[Floats, float], ...]


def _infer(observed: Observed, q: Covariances) -> tuple[Posterior, Moments]:
    """Messages up the tree and down again."""
    types = observed.deviations.shape[1]
    classes, families = len(observed.family_of), int(observed.family_of.max(initial=-1)) + 1
    eye = np.eye(types)
    own = observed.precision[:, :, None] * eye
    up = [(own, observed.precision * observed.deviations)]
    for parents, count, level in ((observed.class_of, classes, 3), (observed.family_of, families, 2)):
        up.append(_upward(up[-1], parents, count, q[level], eye))
    root = _upward(up[-1], np.zeros(families, np.int64), 1, q[1], eye)
    cov = np.linalg.solve(eye + q[0] @ root[0][0], q[0])
    mean, covariance = (cov @ root[1][0])[None], cov[None]
    moments = []
    tree = (np.zeros(families, np.int64), observed.family_of, observed.class_of)
    for parents, level in zip(tree, (1, 2, 3), strict=True):
        mean, covariance, moment = _downward(up[3 - level], parents, q[level], eye, mean, covariance)
        moments.append(moment)
    variance = np.maximum(np.diagonal(covariance, axis1=1, axis2=2), 1e-12)
    return Posterior(mean, np.sqrt(variance)), tuple(moments)


_Message = tuple[Floats, Floats]
"""Precision matrix and precision times mean, one per node."""


def _upward(message: _Message, parents: Ints, count: int, q: Floats, eye: Floats) -> _Message:
    """The children's evidence about their parents."""
    precision, scaled = message
    factor = np.linalg.inv(eye + precision @ q)
    total = np.zeros((count, *eye.shape))
    shift = np.zeros((count, len(eye)))
    np.add.at(total, parents, factor @ precision)
    np.add.at(shift, parents, np.einsum("nij,nj->ni", factor, scaled))
    return total, shift


def _downward(
    message: _Message, parents: Ints, q: Floats, eye: Floats, mean: Floats, covariance: Floats
) -> tuple[Floats, Floats, tuple[Floats, float]]:
    """The children's marginals from their parents', and the second moment of the steps between them."""
    precision, scaled = message
    pull = np.linalg.inv(eye + q @ precision)
    own = pull @ q
    above, wide = mean[parents], covariance[parents]
    here = np.einsum("nij,nj->ni", own, scaled) + np.einsum("nij,nj->ni", pull, above)
    marginal = own + pull @ wide @ pull.transpose(0, 2, 1)
    difference = pull - eye
    step = here - above
    second = own + difference @ wide @ difference.transpose(0, 2, 1) + step[:, :, None] * step[:, None, :]
    total = second.sum(axis=0)
    return here, marginal, ((total + total.T) / 2, float(len(parents)))
