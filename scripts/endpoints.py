"""The scripts/run of this checkout: whether it runs, where, and its hosts (.run/endpoints.json, which Envoy reads again whenever a file is renamed into .run/)."""
import fcntl
import ipaddress
import json
import os
import re

FILE = ".run/endpoints.json"
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def runs():
    """Whether a scripts/run holds its lock."""
    try:
        with open(f"{ROOT}/.run/lock", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def status_port():
    """The port of its status page, or an OSError or ValueError."""
    with open(f"{ROOT}/.run/envoy.yaml", encoding="utf-8") as file:
        found = re.search(r"- name: status\n +address: .*port_value: (\d+)", file.read())
    if found is None:
        raise ValueError(".run/envoy.yaml has no status listener")
    return int(found[1])


def is_port(text):
    return text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535


def parse(text):
    """A host's address as Plimsoll writes it, or a ValueError. No names: EDS resolves none."""
    ip, colon, port = text.strip().rpartition(":")
    wrong = ValueError(f"{text!r} is not an IP address and a port in 1..=65535, such as 10.0.0.1:8188 or [fd00::1]:8188 (names are not resolved here)")
    bracketed = ip.startswith("[") and ip.endswith("]")
    try:
        address = ipaddress.ip_address(ip[1:-1] if bracketed else ip)
    except ValueError:
        raise wrong from None
    if not colon or (address.version == 6) != bracketed or not is_port(port):
        raise wrong
    # Envoy and Plimsoll would write these two in different ways.
    is_v4_inside = address.version == 6 and int(address) >> 32 in (0, 0xFFFF) and not address.is_loopback and not address.is_unspecified
    if address.version == 6 and (address.scope_id or is_v4_inside):
        raise ValueError(f"{text!r}: write an IPv4 address as such, and an IPv6 address without a zone")
    if address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
        raise ValueError(f"{text!r} is nobody's own address")
    return f"[{address}]:{int(port)}" if bracketed else f"{address}:{int(port)}"


def read():
    """Each host's address with its weight and whether it is drained, in the file's order."""
    with open(FILE, encoding="utf-8") as file:
        (resource,) = json.load(file)["resources"]
    hosts = {}
    for locality in resource["endpoints"]:
        for host in locality["lb_endpoints"]:
            socket = host["endpoint"]["address"]["socket_address"]
            ip = socket["address"]
            address = f"[{ip}]:{socket['port_value']}" if ":" in ip else f"{ip}:{socket['port_value']}"
            hosts[address] = {"weight": host.get("load_balancing_weight", 1), "drain": host.get("health_status") == "DRAINING"}
    return hosts


def write(hosts):
    """Replaces the file in one step, as Envoy's watch on its folder wants it."""
    lines = []
    for address, host in hosts.items():
        ip, _, port = address.rpartition(":")
        socket = {"address": ip.strip("[]"), "port_value": int(port)}
        status = "DRAINING" if host["drain"] else "HEALTHY"
        line = {"load_balancing_weight": host["weight"], "health_status": status, "endpoint": {"address": {"socket_address": socket}}}
        lines.append("    " + json.dumps(line))
    kind = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
    head = f'{{ "resources": [ {{ "@type": "{kind}", "cluster_name": "gpu", "endpoints": [ {{ "lb_endpoints": [\n'
    with open(FILE + ".new", "w", encoding="utf-8") as file:
        file.write(head + ",\n".join(lines) + "\n] } ] } ] }\n")
    os.replace(FILE + ".new", FILE)
