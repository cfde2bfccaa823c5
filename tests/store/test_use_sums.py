"""Sums of the samples of nodes and jobs, in each kind of database."""

from dataclasses import astuple

from koalapy.model.history import UseSum
from koalapy.store.opening import Stores

MANY = 40_000_000
"""Nodes of one cluster: their sums of an hour need more than 32 bits."""


def test_sums_of_many_nodes_are_whole_numbers(stores: Stores) -> None:
    sample = UseSum(0, "north", 1, MANY, startup=0.5)
    for minute in range(60):
        stores.samples.add([sample], 3600.0 + 60 * minute)
    (read,) = stores.samples.read(3600, 7200, 0.0, 9000.0, ["north"])
    assert read == UseSum(0, "north", 60, 60 * MANY, startup=30.0)
    assert {type(value) for value in astuple(read)} == {int, str, float}
