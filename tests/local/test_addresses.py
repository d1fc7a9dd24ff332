"""Addresses and ports: chosen free of conflicts, and the same every time."""

from __future__ import annotations

from ipaddress import IPv4Network

import pytest

from busbar.local.addresses import FIRST, LAST, Addresses, check_name, choose, choose_port, parse_routes
from busbar.local.errors import InstanceError


def test_the_same_name_gets_the_same_network() -> None:
    assert choose("busbar", []) == choose("busbar", [])


def test_a_taken_network_is_stepped_over() -> None:
    first = choose("busbar", [])
    second = choose("busbar", [first.network])
    assert not second.network.overlaps(first.network)


def test_a_small_route_inside_a_candidate_counts_as_a_conflict() -> None:
    first = choose("busbar", [])
    inside = IPv4Network(f"10.{first.octet}.77.0/30")
    assert choose("busbar", [inside]) != first


def test_the_default_route_takes_nothing() -> None:
    assert choose("busbar", [IPv4Network("0.0.0.0/0")]) == choose("busbar", [])


def test_a_machine_without_a_free_network_is_told() -> None:
    with pytest.raises(InstanceError, match=f"N from {FIRST} to {LAST}"):
        choose("busbar", [IPv4Network("10.0.0.0/8")])


def test_the_ranges_of_an_instance_do_not_overlap_and_lie_in_its_network() -> None:
    at = Addresses(77)
    ranges = [IPv4Network(text) for text in (f"{at.node}/30", at.pods, at.services, at.simulated)[1:]]
    for index, one in enumerate(ranges):
        assert one.subnet_of(at.network)
        assert not any(one.overlaps(other) for other in ranges[index + 1 :])
        assert IPv4Network(f"{at.node}/32").subnet_of(at.network)
        assert not IPv4Network(f"{at.node}/32").subnet_of(one)
    assert IPv4Network(f"{at.dns}/32").subnet_of(IPv4Network(at.services))


def test_device_names_fit_the_kernels_limit() -> None:
    assert all(len(Addresses(octet).host_device + "i") <= 15 for octet in range(FIRST, LAST + 1))


@pytest.mark.parametrize("name", ["a", "busbar", "second-one", "x" * 20])
def test_good_names_pass(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "1st", "Big", "a_b", "../x", "x" * 21, "-a"])
def test_bad_names_are_refused_with_the_rule(name: str) -> None:
    with pytest.raises(InstanceError, match="small letter"):
        check_name(name)


def test_the_preferred_port_is_taken_when_it_is_free() -> None:
    assert choose_port(30080, lambda port: True) == 30080


def test_busy_and_reserved_ports_are_stepped_over() -> None:
    assert choose_port(30080, lambda port: port != 30080, avoid=[30081]) == 30082


def test_no_free_port_is_an_error() -> None:
    with pytest.raises(InstanceError, match="30080"):
        choose_port(30080, lambda port: False)


def test_routes_are_read_and_nonsense_is_passed_over() -> None:
    found = parse_routes(["default", "192.0.2.0/24", "10.1.2.3", "10.1.2.3/8", "fe80::/64", "unreachable"])
    assert [str(network) for network in found] == ["0.0.0.0/0", "192.0.2.0/24", "10.1.2.3/32", "10.0.0.0/8"]
