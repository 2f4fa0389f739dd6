"""Runs the dashboard's queries and the alert rules in a real Prometheus that scrapes a real Envoy (scripts/run), while hosts fail and the queue fills.

Every query must be understood, and give data with the labels that its legend names, but for those of QUIET. Every rule must be healthy, and those of FIRES must fire,
with texts that expand. Only the waiting is shortened: a scrape and an evaluation each second, and two seconds for each `for`.
"""
import json
import math
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
# What is in a query that has no data in this setup.
QUIET = {
    "plimsoll_bad_reports": "the simulated hosts of scripts/run send no load reports",
    "envoy_server_uptime{instance=~\"$instance\"} < 60": "a busy machine may take that long until Prometheus is there",
}
# What happens here, and how it is noticed; the last one when Envoy is stopped.
FIRES = {"PlimsollNoHost", "PlimsollManyHostsOut", "PlimsollHostOut", "PlimsollQueueFilling", "PlimsollJobsRefused", "PlimsollHostFails", "PlimsollConfigurationRefused", "PlimsollEnvoyDown"}
NEVER = {"PlimsollCountsDrift", "PlimsollNotRunning", "PlimsollNotScraped", "PlimsollNotFollowed", "PlimsollWorkerDied"}
POOL = {
    "discovery": {"cluster": "envoy_admin"}, "policy": "least_time", "max_in_flight": 2, "jobs": {},
    "class": {"header": "x-job-class"}, "priority": {"header": "x-job-priority"}, "queue": {"max_length": 12, "timeout_ms": 2500},
    "failure": {"base_ejection_ms": 1000}, "probe": {"path": "/health", "interval_ms": 500, "timeout_ms": 400},
    "explain": "log", "telemetry": {"scrape": {"preset": "custom", "path": "/metrics", "metrics": {"running": "jobs"}}},
}
# The second pool has no cluster and no jobs: it must not get in the way of the first. The hosts take whatever is posted, alerts too.
PLIMSOLL = {"trusted_headers": True, "pools": {"gpu": POOL, "idle": {"hosts": [{"address": "127.0.0.1:1"}]}}, "alerts": {"cluster": "gpu"}}
CLASSES, PRIORITIES = ("draft", "large", "upscale"), ("high", "normal", "low")

opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
faults = []


def free_ports(count):
    """Ports that nobody has now; all are held until all are found."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def fleet_port():
    """The first of five ports in a row that nobody has."""
    for first in range(21001, 30000, 10):
        try:
            for each in [socket.create_server(("127.0.0.1", first + n)) for n in range(5)]:
                each.close()
            return first
        except OSError:
            continue
    sys.exit("error: no five free ports in a row")


def wait_for(what, check, seconds=30):
    """Until it gives something true, and that; it ends the program where that takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if found := check():
                return found
        except OSError:
            pass
        time.sleep(0.2)
    sys.exit(f"error: {what}: not within {seconds} s")


class Setup:
    """scripts/run with a configuration of ours, and jobs."""

    def __init__(self, work):
        self.port, self.status, self.admin = free_ports(3)
        self.fleet = fleet_port()
        self.ended = threading.Event()
        options = {"--port": self.port, "--status-port": self.status, "--admin-port": self.admin, "--fleet-port": self.fleet}
        self.log = work / "run.log"
        with open(self.log, "w", encoding="utf-8") as log:
            command = [ROOT / "scripts/run", *(str(part) for pair in options.items() for part in pair)]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def wait(self):
        wait_for("scripts/run", self.is_up, 300)
        self.configure(json.dumps(PLIMSOLL, indent=2))

    def is_up(self):
        if self.process.poll() is not None:
            sys.exit(f"error: scripts/run ended:\n{self.log.read_text(encoding='utf-8')}")
        return "Ctrl-C ends everything" in self.log.read_text(encoding="utf-8")

    def configure(self, configuration):
        """Puts it in the place of the one in force, as the README says."""
        path = ROOT / ".run/plimsoll.yaml"
        head = path.read_text(encoding="utf-8").partition("value: |\n")[0]
        lines = "".join(f"          {line}\n" for line in configuration.splitlines())
        path.with_name(".new").write_text(f"{head}value: |\n{lines}", encoding="utf-8")
        path.with_name(".new").rename(path)

    def stop(self):
        self.ended.set()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()

    def work(self, clients, end):
        """So many clients, each with one job after the other, in the background until the end."""
        for number in range(clients):
            threading.Thread(target=self.client, args=(number, end), daemon=True).start()

    def client(self, number, end):
        while not end.is_set():
            self.job(number)

    def job(self, number, method="POST"):
        headers = {"x-job-class": CLASSES[number % 3], "x-job-priority": PRIORITIES[number % 3]}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/prompt", data=b"{}" if method == "POST" else None, method=method, headers=headers)
        try:
            with opener.open(request, timeout=20) as answer:
                answer.read()
        except OSError:
            # Some fail on purpose, and when all ends they end with it.
            time.sleep(0.2)

    def tell(self, host, **change):
        """Changes a simulated host, by its number from 0."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.fleet + host}/sim/set", data=json.dumps(change).encode(), method="POST")
        with opener.open(request, timeout=5) as answer:
            answer.read()


class Prometheus:
    """With our files, of which only the pace and the targets are changed."""

    def __init__(self, work, admin):
        (self.port,) = free_ports(1)
        for name in ("prometheus.yml", "alerts.yml"):
            text = (HERE / name).read_text(encoding="utf-8")
            text = re.sub(r"^( +(?:scrape|evaluation)_interval): \w+", r"\1: 1s", text, flags=re.M)
            (work / name).write_text(re.sub(r"^( +for): \w+", r"\1: 2s", text, flags=re.M), encoding="utf-8")
        targets = (HERE / "targets.yml").read_text(encoding="utf-8")
        # The one Envoy under two names: for Prometheus these are two, and what joins series must not mix them up.
        two = f'127.0.0.1:{admin}", "localhost:{admin}'
        (work / "targets.yml").write_text(targets.replace("127.0.0.1:9901", two), encoding="utf-8")
        command = ["prometheus", f"--config.file={work}/prometheus.yml", f"--storage.tsdb.path={work}/data", f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=error"]
        self.process = subprocess.Popen(command)
        self.since = time.time()

    def wait(self):
        wait_for("Prometheus", lambda: len(self.query("up == 1")) == 2, 30)

    def ask(self, path, **parameters):
        """The data of an answer, or what is wrong with the question as a ValueError."""
        try:
            with opener.open(f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code not in (400, 422):
                raise
            raise ValueError(json.load(error)["error"]) from None

    def query(self, expression):
        return self.ask("query", query=expression)["result"]

    def over_time(self, expression):
        return self.ask("query_range", query=expression, start=self.since, end=time.time(), step=1)["result"]

    def firing(self):
        return {alert["labels"]["alertname"]: alert["annotations"] for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"}

    def stop(self):
        self.process.terminate()
        self.process.wait()


def filled(text):
    """As Grafana fills in its variables."""
    for name, value in {"$__rate_interval": "5s", "$__interval": "1s", "$__range": "180s", "$pool": "gpu", "$instance": ".+"}.items():
        text = text.replace(name, value)
    return text


def check_query(prometheus, where, expression, legend, ask):
    try:
        series = ask(filled(expression))
    except ValueError as error:
        faults.append(f"{where}: {error}")
        return
    values = [float(value) for each in series for _, value in each.get("values", [each.get("value")])]
    if not any(map(math.isfinite, values)) and not any(part in expression for part in QUIET):
        faults.append(f"{where}: no data: {expression}")
    for label in re.findall(r"{{(\w+)}}", legend):
        if any(not each["metric"].get(label) for each in series):
            faults.append(f"{where}: a series without the label {label}: {expression}")


def check_dashboard(prometheus):
    dashboard, count = json.loads((HERE / "dashboard.json").read_text(encoding="utf-8")), 0
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            ask = prometheus.query if target["instant"] else prometheus.over_time
            check_query(prometheus, f"dashboard: {panel['title']}", target["expr"], target["legendFormat"], ask)
            count += 1
    for each in dashboard["annotations"]["list"]:
        if "expr" in each:
            check_query(prometheus, f"dashboard: annotation {each['name']}", each["expr"], "", prometheus.over_time)
    for each in dashboard["templating"]["list"]:
        if each["type"] == "query":
            selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", each["definition"]).groups()
            if not prometheus.ask(f"label/{label}/values", **{"match[]": filled(selector)}):
                faults.append(f"dashboard: variable {each['name']}: no values")
    return count


def check_rules(prometheus, fired):
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    for rule in rules:
        if rule["health"] != "ok":
            faults.append(f"alerts.yml: {rule['name']}: {rule.get('lastError') or rule['health']}")
    for name in sorted(FIRES - fired.keys()):
        faults.append(f"alerts.yml: {name}: it did not fire")
    for name in sorted(NEVER & fired.keys()):
        faults.append(f"alerts.yml: {name}: it fired: {fired[name]['summary']}")
    for name, texts in fired.items():
        if any("<error" in text or "%!" in text or "  " in text for text in texts.values()):
            faults.append(f"alerts.yml: {name}: its text does not expand: {texts}")
    return len(rules)


def wait_for_alerts(prometheus, fired, *names):
    """Until they have fired, or for 25 s; those that have not are named at the end. Each that fires is put into `fired`, with its texts."""
    end = time.monotonic() + 25
    while not set(names) <= fired.keys() and time.monotonic() < end:
        fired.update(prometheus.firing())
        time.sleep(0.3)


def story(setup, prometheus, fired):
    """What happens to the hosts, each part until its alerts fire."""
    for host in range(4):
        setup.tell(host, metrics="jobs 1\n")
    setup.job(0, "GET")
    # More jobs than there are slots and places in the queue: then hosts that fail are tried, too.
    crowd = threading.Event()
    setup.work(9, setup.ended)
    setup.work(24, crowd)
    # A host that answers 500, first until it is ejected, then to every other job; and one whose connections break.
    setup.tell(2, fault={"fault": "status", "status": 500})
    wait_for("an ejection", lambda: prometheus.query("plimsoll_ejections"), 40)
    setup.tell(2, fault={"fault": "status", "status": 500, "fraction": 0.5})
    setup.tell(1, fault={"fault": "refuse_stream", "fraction": 0.3})
    wait_for_alerts(prometheus, fired, "PlimsollHostFails", "PlimsollQueueFilling", "PlimsollJobsRefused")
    crowd.set()
    setup.tell(2, clear=True)
    setup.configure('{"pools": {"gpu": {"polcy": "least_time"}}}')
    for host in range(4):
        setup.tell(host, health=503)
    setup.tell(3, metrics="")
    wait_for_alerts(prometheus, fired, "PlimsollNoHost", "PlimsollManyHostsOut", "PlimsollHostOut", "PlimsollConfigurationRefused")


def main():
    with tempfile.TemporaryDirectory() as work:
        work, started, fired = pathlib.Path(work), [], {}
        try:
            setup = Setup(work)
            started.append(setup)
            setup.wait()
            prometheus = Prometheus(work, setup.admin)
            started.append(prometheus)
            prometheus.wait()
            story(setup, prometheus, fired)
            queries = check_dashboard(prometheus)
            setup.stop()
            wait_for_alerts(prometheus, fired, "PlimsollEnvoyDown")
            rules = check_rules(prometheus, fired)
        finally:
            for each in reversed(started):
                each.stop()
    if faults:
        sys.exit("\n".join(f"error: {fault}" for fault in faults))
    print(f"{queries} queries of the dashboard give what they should, {rules} rules are healthy, and {len(fired)} alerts fired: {', '.join(sorted(fired))}")


# So that what was started is ended, too.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
os.chdir(ROOT)
main()
