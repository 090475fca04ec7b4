"""A small internet on one machine: hosts, home routers, slow and broken links, made of network namespaces.

It needs root and touches nothing outside its own namespaces. `Lab` is where to begin:

    with Lab() as lab:
        server = lab.host("server")
        home = lab.router("home")
        laptop = lab.host("laptop", home)
        laptop.limit(up_mbit=1, down_mbit=10)
        laptop.run("ping", "-c1", server.ip)
"""

from .names import missing
from .network import Counters, Host, Lab, Network, Router

__all__ = ["Counters", "Host", "Lab", "Network", "Router", "missing"]
