"""The network interfaces of this machine."""

from __future__ import annotations

import psutil


def interface_of(address: str) -> str:
    """Return the interface that has an IP address; empty if none has.

    Examples
    --------
    >>> interface_of("127.0.0.1"), interface_of("192.0.2.1")
    ('lo', '')
    """
    for name, items in psutil.net_if_addrs().items():
        if any(item.address == address for item in items):
            return str(name)
    # All of 127.0.0.0/8 is there, and only the first address is listed.
    return "lo" if address.startswith("127.") else ""
