"""The lab does what it says: NAT hides, limits limit, cuts cut, and nothing stays, also after kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_until

from . import Host, Lab, names
from .traffic import can_connect, seconds_to_send, serve_bytes, start_proxy

TESTS = Path(__file__).parent.parent


def test_a_router_lets_its_home_out_and_nobody_in_unless_a_port_is_forwarded(lab: Lab) -> None:
    server, home = lab.host("server"), lab.router("home")
    laptop, neighbour = lab.host("laptop", home), lab.host("neighbour", home)
    for host in (server, laptop):
        serve_bytes(host, 4000)
    assert can_connect(laptop, server.ip, 4000)
    assert can_connect(neighbour, laptop.ip, 4000)
    assert not can_connect(server, laptop.ip, 4000)
    assert not can_connect(server, home.ip, 4000)
    home.forward(4000, laptop)
    assert can_connect(server, home.ip, 4000)


def test_two_homes_may_use_the_same_private_addresses(lab: Lab) -> None:
    server = lab.host("server")
    laptops = [lab.host(f"laptop-{n}", lab.router(f"home-{n}", lan_ip4="192.168.0")) for n in (1, 2)]
    serve_bytes(server, 4000)
    assert laptops[0].ip == laptops[1].ip
    assert all(can_connect(laptop, server.ip, 4000) for laptop in laptops)


def test_hosts_on_the_internet_have_ipv6_too(lab: Lab) -> None:
    first, second = lab.host("first"), lab.host("second")
    serve_bytes(first, 4000, family="::")
    assert can_connect(second, first.ip6, 4000)


def test_limits_hold_in_their_direction_and_bytes_are_counted(lab: Lab) -> None:
    server, laptop = lab.host("server"), lab.host("laptop")
    for host in (server, laptop):
        serve_bytes(host, 4000)
    num_bytes = 1_000_000
    laptop.limit(up_mbit=8, down_mbit=80)
    before = laptop.counters()
    down_s = seconds_to_send(server, laptop.ip, 4000, num_bytes)
    between = laptop.counters()
    up_s = seconds_to_send(laptop, server.ip, 4000, num_bytes)
    down, up = between - before, laptop.counters() - between
    assert 0.8 < up_s < 3  # 1 s at this rate, and the two cores may be busy with something else
    assert down_s < up_s / 2
    assert num_bytes < down.received < 1.2 * num_bytes
    assert num_bytes < up.sent < 1.2 * num_bytes
    assert down.sent < num_bytes / 4
    laptop.limit()
    assert seconds_to_send(laptop, server.ip, 4000, num_bytes) < up_s / 2


def test_a_cut_link_passes_nothing_and_a_healed_one_everything(lab: Lab) -> None:
    server, laptop = lab.host("server"), lab.host("laptop")
    serve_bytes(server, 4000)
    laptop.cut()
    assert not can_connect(laptop, server.ip, 4000)
    laptop.heal()
    assert can_connect(laptop, server.ip, 4000)


def test_a_host_moves_to_another_network(lab: Lab) -> None:
    server, home = lab.host("server"), lab.router("home")
    laptop = lab.host("laptop")
    serve_bytes(server, 4000)
    serve_bytes(laptop, 4000)
    old = laptop.ip
    assert can_connect(server, old, 4000)
    laptop.change_address()
    assert laptop.ip != old
    assert can_connect(server, laptop.ip, 4000)
    assert not can_connect(server, old, 4000)
    laptop.plug(home.lan)
    assert can_connect(laptop, server.ip, 4000)
    assert not can_connect(server, home.ip, 4000)


def test_the_proxy_delays_and_loses(lab: Lab) -> None:
    server, middle, laptop = lab.host("server"), lab.host("middle"), lab.host("laptop")
    serve_bytes(server, 4000)
    start_proxy(middle, 5000, server, 4000, delay_ms=150)
    start_proxy(middle, 5001, server, 4000, loss=0.5)
    near_s = seconds_to_send(laptop, server.ip, 4000, 1000)
    far_s = seconds_to_send(laptop, middle.ip, 5000, 1000)
    assert far_s - near_s > 0.25  # there and back
    bad_s = seconds_to_send(laptop, middle.ip, 5001, 400_000)
    assert bad_s > 0.8  # some 25 chunks, every second one of them sent again after 0.2 s
    far_bulk_s = seconds_to_send(laptop, middle.ip, 5000, 4_000_000)
    assert far_bulk_s < 3  # a delay is not a limit on the rate


OWNER = """
import sys, time
sys.path.insert(0, {tests!r})
from lab import Lab
lab = Lab()
host = lab.host("server")
process = host.start("sleep", "1000")
print(host.namespace, process.pid, lab._reaper.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("does_reaper_live", [True, False], ids=["alone", "with its reaper"])
def test_nothing_stays_when_the_owner_of_a_lab_is_killed(lab: Lab, does_reaper_live: bool) -> None:
    bystander = lab.host("bystander").start("sleep", "1000")
    code = OWNER.format(tests=str(TESTS))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        namespace, sleeper, reaper = owner.stdout.readline().split()
        assert namespace in names.namespaces()
        if not does_reaper_live:
            os.kill(int(reaper), signal.SIGKILL)
        owner.kill()
    if not does_reaper_live:
        assert namespace in names.namespaces()
        Lab().close()  # the next one cleans up
    wait_until(lambda: namespace not in names.namespaces(), "the namespaces to go", 10)
    wait_until(lambda: not Path(f"/proc/{sleeper}").exists(), "the process in it to end", 5)
    assert bystander.poll() is None, "a lab that is in use was swept away"


def test_a_closed_lab_leaves_no_process_and_no_namespace() -> None:
    if reason := names.missing():
        pytest.skip(reason)
    with Lab() as lab:
        host: Host = lab.host("server")
        process = host.start("sleep", "1000")
        assert host.namespace in names.namespaces()
    assert process.wait(5) == -signal.SIGKILL
    assert host.namespace not in names.namespaces()


def test_without_root_the_lab_says_so() -> None:
    code = f"import os, sys; sys.path.insert(0, {str(TESTS)!r}); os.geteuid = lambda: 1000\nfrom lab import Lab\nLab()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs root" in done.stderr
