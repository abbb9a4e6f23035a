"""Rotations: a randomised Hadamard matrix spreads an outlier channel over all, so that none stands out.

A Hadamard matrix exists for every power of two and, by Paley's two constructions, for many multiples of four;
the matrix of a width is the Kronecker product of both. Where no construction fits the odd part of a width, a
seeded random orthogonal matrix is used for it, which spreads almost as well.
https://arxiv.org/abs/2404.00456, https://arxiv.org/abs/2405.16406
"""

from __future__ import annotations

import numpy as np

from quantkit.model.model_map import ModelMap
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.grid import Doubles
from quantkit.quantization.transforms.basis import Basis, HeadRotation, Rotation
from quantkit.quantization.transforms.change import apply_change
from quantkit.quantization.transforms.settings import TransformSettings
from quantkit.quantization.transforms.source import Changed
from quantkit.quantization.transforms.spaces import no_space, require_spaces

LARGEST_FACTOR = 128  # larger powers of two are split into factors, which is as exact and much cheaper
LARGEST_PALEY = 512


def rotate_residual(model_map: ModelMap, source: TensorSource, settings: TransformSettings) -> Changed:
    """Rotate the residual stream, after folding its norms."""
    residual = next(space for space in require_spaces(model_map) if space.kind == "residual")
    basis = random_hadamard(residual.width, settings.seed) if residual.width else None
    changes: dict[str, Basis] = {"residual": basis} if basis else {}
    return apply_change(model_map, source, changes, unties_head=settings.unties_head)


def rotate_heads(model_map: ModelMap, source: TensorSource, settings: TransformSettings) -> Changed:
    """Rotate the values of every head, between its value and its output projection."""
    changes: dict[str, Basis] = {}
    for number, space in enumerate(require_spaces(model_map)):
        if "per_head_orthogonal" in space.permits:
            rotations = [
                random_hadamard(space.head_dim, settings.seed, number, head).matrix_II()
                for head in range(space.num_kv_heads)
            ]
            changes[space.name] = HeadRotation(rotations_HDD=np.stack(rotations))
    if not changes:
        raise no_space(model_map, "no attention of it permits a rotation of its values")
    return apply_change(model_map, source, changes, unties_head=settings.unties_head)


def random_hadamard(width: int, *seed: int) -> Rotation:
    """Random signs, then a Hadamard matrix of this width, or with a random orthogonal factor."""
    random = np.random.default_rng([*seed, width])
    odd, power = width, 1
    while odd % 2 == 0:
        odd, power = odd // 2, power * 2
    factors: list[Doubles] = []
    if odd > 1:
        order, paley = odd, None
        while paley is None and order <= min(width, LARGEST_PALEY) and width % order == 0:
            paley = paley_hadamard(order)
            order *= 2
        if paley is not None:
            factors.append(paley / np.sqrt(len(paley)))
            power //= len(paley) // odd
        else:
            factors.append(_random_orthogonal(odd, random))
    while power > 1:
        size = min(power, LARGEST_FACTOR)
        factors.append(sylvester_hadamard(size) / np.sqrt(size))
        power //= size
    return Rotation(signs_I=random.choice([-1.0, 1.0], width), factors=tuple(factors))


def sylvester_hadamard(size: int) -> Doubles:
    """The Hadamard matrix of a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def paley_hadamard(order: int) -> Doubles | None:
    """A Hadamard matrix of this order from the squares modulo a prime, or None where the order has none."""
    if order % 4:
        return None
    if _is_prime(order - 1) and (order - 1) % 4 == 3:
        core = _conference_core(order - 1)
        skew = np.zeros((order, order))
        skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, core
        return skew + np.eye(order)
    half = order // 2
    if half > 2 and _is_prime(half - 1) and (half - 1) % 4 == 1:
        symmetric = np.ones((half, half))
        symmetric[0, 0], symmetric[1:, 1:] = 0, _conference_core(half - 1)
        return np.kron(symmetric, [[1, 1], [1, -1]]) + np.kron(np.eye(half), [[1, -1], [-1, -1]])
    return None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _conference_core(prime: int) -> Doubles:
    """1 where row minus column is a square modulo the prime, -1 where not, 0 on the diagonal."""
    character = -np.ones(prime)
    character[np.arange(1, prime) ** 2 % prime] = 1
    character[0] = 0
    places = np.arange(prime)
    core: Doubles = character[(places[:, None] - places[None, :]) % prime]
    return core


def _random_orthogonal(size: int, random: np.random.Generator) -> Doubles:
    """A random rotation from the uniform (Haar) distribution."""
    q_II, r_II = np.linalg.qr(random.normal(size=(size, size)))
    rotation: Doubles = q_II * np.sign(np.diag(r_II))
    return rotation
