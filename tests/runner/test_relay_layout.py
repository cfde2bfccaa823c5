"""The layout of ports of a job with relayed links."""

from koalapy.runner.relay_links import FIRST_PORT, LAST_PORT, count_ports, node_ports, split_ports


def test_ranges_of_nodes_are_contiguous_and_do_not_overlap():
    slots = [4, 0, 1, 64]
    ranges = node_ports(FIRST_PORT, slots)
    ports = [port for first, last in ranges for port in range(first, last + 1)]
    assert ports == list(range(FIRST_PORT, FIRST_PORT + count_ports(slots)))
    for count, (first, last) in zip(slots, ranges, strict=True):
        control, ranks = split_ports((first, last))
        assert control[1] + 1 == ranks[0]
        assert (control[0], ranks[1]) == (first, last)
        assert ranks[1] - ranks[0] + 1 > count


def test_ports_lie_below_those_of_outgoing_connections():
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        assert int(file.read().split()[0]) > LAST_PORT
