"""How much may be held at once, and products in less time."""

from __future__ import annotations

import pytest
import torch

from headway.core.devices import FULL, fast_products

CPU = torch.device("cpu")


def product_error() -> float:
    """Of a product of float32 matrices, relative to all its digits."""
    draw = torch.Generator().manual_seed(1)
    a, b = (torch.randn(300, 300, generator=draw) for _ in range(2))
    exact = a.double() @ b.double()
    return float((a @ b - exact).norm() / exact.norm())


def test_where_all_digits_are_asked_for_products_keep_them():
    with fast_products(CPU):
        assert product_error() < 1e-6
    with fast_products(CPU, digits=3):
        assert product_error() < 1e-3


def test_where_few_digits_are_enough_products_have_those():
    with fast_products(CPU, digits=2):
        assert product_error() < 1e-2
    with fast_products(CPU, digits=2), fast_products(CPU, digits=FULL):
        assert product_error() < 1e-6


def test_the_setting_that_was_there_comes_back():
    before = torch.get_float32_matmul_precision()
    with pytest.raises(KeyError), fast_products(CPU, digits=2):
        raise KeyError(torch.get_float32_matmul_precision())
    assert torch.get_float32_matmul_precision() == before
