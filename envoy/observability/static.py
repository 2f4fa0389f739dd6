"""What can be checked of the observability files without running anything: the dashboard's shape, and every metric's name against the code's table."""
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
# Envoy's own, which the code does not know.
ENVOYS = {
    "envoy_server_uptime", "envoy_server_memory_allocated", "envoy_http_downstream_rq_xx", "envoy_cluster_membership_healthy", "envoy_cluster_membership_total",
    "envoy_wasm_plimsoll_vm_reload", "envoy_extension_config_discovery_http_filter_plimsoll_update_rejected",
}
UNITS = {"short", "none", "percentunit", "ms", "µs", "reqps", "ops", "bytes", "dtdurations"}
# What Grafana knows of each kind of panel: it says nothing of a word that it does not know, and goes on without.
OPTIONS = {
    "timeseries": {"legend", "tooltip"},
    "stat": {"reduceOptions", "colorMode", "graphMode", "textMode", "justifyMode", "orientation", "wideLayout"},
    "bargauge": {"reduceOptions", "orientation", "displayMode", "valueMode", "showUnfilled", "sizing", "minVizWidth", "minVizHeight", "maxVizHeight", "namePlacement", "legend"},
    "state-timeline": {"mergeValues", "showValue", "alignValue", "rowHeight", "perPage", "legend", "tooltip"},
    "heatmap": {"calculate", "calculation", "color", "cellGap", "filterValues", "yAxis", "rowsFrame", "showValue", "tooltip", "legend", "exemplars"},
}
CUSTOM = {"drawStyle", "lineInterpolation", "lineWidth", "lineStyle", "fillOpacity", "showPoints", "spanNulls", "axisSoftMin", "stacking", "scaleDistribution", "hideFrom"}
DEFAULTS = {"unit", "min", "max", "decimals", "color", "mappings", "thresholds", "custom"}

faults = []


def read(path):
    return path.read_text(encoding="utf-8")


def table():
    """The code's metrics: name in Prometheus, kind and labels."""
    found = re.findall(r'= (Gauge|Counter|Histogram) "(\w+)" \[([^\]]*)\]', read(ROOT / "src/roles/metrics/family.rs"))
    return {f"plimsoll_{name}": (kind, re.findall(r"\w+", labels)) for kind, name, labels in found}


def selectors(expression):
    """The metrics in an expression, each with the labels that it is chosen by."""
    expression = re.sub(r"\b(by|on) \([^)]*\)", "", expression)
    found = re.findall(r"\b((?:plimsoll|envoy)_\w+)(?:\{([^}]*)\})?", expression)
    return [(name, re.findall(r"(\w+)(?:=~|!=|!~|=)", chosen)) for name, chosen in found]


def check_panels(panels):
    taken = set()
    for panel in panels:
        title, at = panel["title"], panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        if cells & taken or at["x"] + at["w"] > 24:
            faults.append(f"dashboard: {title}: it lies over another panel, or beyond the edge")
        taken |= cells
        if panel["type"] == "row":
            continue
        if not panel.get("description") or not panel["targets"]:
            faults.append(f"dashboard: {title}: it has no description, or no query")
        if panel["fieldConfig"]["defaults"]["unit"] not in UNITS:
            faults.append(f"dashboard: {title}: there is no such unit as {panel['fieldConfig']['defaults']['unit']}")
        defaults = panel["fieldConfig"]["defaults"]
        properties = {each["id"] for override in panel["fieldConfig"]["overrides"] for each in override["properties"]}
        words = (panel["options"].keys() - OPTIONS[panel["type"]]) | (defaults["custom"].keys() - CUSTOM) | (defaults.keys() - DEFAULTS)
        words |= properties - DEFAULTS - {f"custom.{word}" for word in CUSTOM}
        if words:
            faults.append(f"dashboard: {title}: Grafana does not know {', '.join(sorted(words))}")
        if {target["datasource"]["uid"] for target in panel["targets"]} | {panel["datasource"]["uid"]} != {"${datasource}"}:
            faults.append(f"dashboard: {title}: its data source is not the variable")
    for what in ("id", "title"):
        values = [panel[what] for panel in panels]
        if len(set(values)) < len(values):
            faults.append(f"dashboard: two panels have one {what}")


def check_names(expressions):
    known, used = table(), set()
    for where, expression in expressions:
        for name, labels in selectors(expression):
            base = name if name in known else re.sub("_(bucket|sum|count)$", "", name)
            used.add(base)
            if name in ENVOYS:
                continue
            if base not in known or (base != name) != (known[base][0] == "Histogram"):
                faults.append(f"{where}: {name}: the code has no such metric")
            elif wrong := set(labels) - {*known[base][1], "instance", "job", "le"}:
                faults.append(f"{where}: {name}: it has no label {', '.join(sorted(wrong))}")
    for name in sorted(known.keys() - used):
        faults.append(f"{name}: neither the dashboard nor an alert uses it")
    for name in sorted(ENVOYS - used):
        faults.append(f"{name}: it is listed here, and not used")


def check_alerts(rules):
    readme, tests = read(ROOT / "README.md"), read(HERE / "alerts_test.yml")
    anchors = {"#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", readme, re.M)}
    for name, rule in rules.items():
        if f"\n| {name} |" not in readme:
            faults.append(f"alerts.yml: {name}: the README's table does not have it")
        if f'alertname="{name}"' not in tests:
            faults.append(f"alerts.yml: {name}: no test sees it fire")
        if not re.search("severity: (critical|warning|info)", rule) or "summary:" not in rule:
            faults.append(f"alerts.yml: {name}: it has no severity or no summary")
        runbook = re.search(r"runbook: README\.md(#\S+)", rule)
        if not runbook or runbook[1] not in anchors:
            faults.append(f"alerts.yml: {name}: its runbook is no section of the README")
    for name in set(re.findall(r"^\| (Plimsoll\w+) \|", readme, re.M)) - rules.keys():
        faults.append(f"README.md: {name}: there is no such alert")


def main():
    dashboard = json.loads(read(HERE / "dashboard.json"))
    check_panels(dashboard["panels"])
    parts = re.split(r"^  - alert: (\w+)\n", read(HERE / "alerts.yml"), flags=re.M)[1:]
    rules = dict(zip(parts[::2], parts[1::2]))
    check_alerts(rules)
    expressions = [(f"dashboard: {panel['title']}", target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", [])]
    expressions += [("dashboard: a variable", each["definition"]) for each in dashboard["templating"]["list"] if each["type"] == "query"]
    expressions += [("dashboard: an annotation", each["expr"]) for each in dashboard["annotations"]["list"] if "expr" in each]
    expressions += [(f"alerts.yml: {name}", rule.partition("labels: {")[0]) for name, rule in rules.items()]
    check_names(expressions)
    if faults:
        sys.exit("\n".join(f"error: {fault}" for fault in faults))
    print(f"{len(dashboard['panels'])} panels, {len(expressions)} expressions, {len(rules)} alerts, {len(table())} metrics")


main()
