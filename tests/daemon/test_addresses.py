"""Addresses at which a command may send its account's token to the daemon."""

import socket

import pytest

from koalapy.daemon.access import reachable_addresses


@pytest.mark.parametrize(("only", "hosts"), [(0, {"::", "127.0.0.1", "::1"}), (1, {"::", "::1"})])
def test_reachable_addresses_with_ipv6_only_omit_ipv4_loopback(only: int, hosts: set[str]) -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        listener.bind(("::", 0))
        assert {host for host, _ in reachable_addresses(listener)} == hosts
