"""Which runs form one row of a report, what the row is called, and which rows can be compared."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from deat.report.run_results import BenchResults, ReportRow, RunResults
from deat.threat import format_threat
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.text import format_eps, make_printable

DIGEST_PREFIX_CHARS = 8
"""Characters of a hash that are shown."""
NON_IDENTITY_SETTINGS = ("seed", "data_root", "download", "device", "threads", "workers", "deterministic")
"""Settings that do not make another row: the seed, and how a run was executed."""
RESULT_NEUTRAL_SETTINGS = ("engine", "block", "workers", "device", "threads", "deterministic", "aa_n", "aa_whole")
"""Settings that change neither training nor evaluation; how many images AutoAttack ran on is reported as a sample."""
NEUTRAL_ATTACK_SETTINGS = {"name", "implementation"}
"""What may differ between attacks of one name: both implementations of AutoAttack give the same verdicts."""


# ---- which runs form a row


def group_runs(runs: Sequence[RunResults]) -> Iterator[ReportRow]:
    """Group runs that differ in their seed alone into rows."""
    runs_by_identity: dict[str, list[RunResults]] = {}
    for run in runs:
        runs_by_identity.setdefault(json.dumps(get_row_identity(run), sort_keys=True, default=str), []).append(run)
    for group in (group for candidates in runs_by_identity.values() for group in group_by_training(candidates)):
        record = group[0].record or {}
        yield ReportRow(record["method"]["name"], record["method"]["name"], record["model"]["name"], tuple(group))


def merge_bench_rows(rows_of_benches: Iterable[tuple[BenchResults, Iterable[ReportRow]]]) -> list[ReportRow]:
    """Merge the rows of several benches.

    Pieces of one bench that ran separately become one row, if no seed is finished in both. Runs of a row that were not
    trained in the same way, because a file was edited between them for example, become rows of their own.

    Args:
        rows_of_benches: Benches with their rows.

    Returns:
        The merged rows in the order of their first appearance.
    """
    rows_by_key: dict[str, list[ReportRow]] = {}
    for bench, rows in rows_of_benches:
        for row in rows:
            key = json.dumps([*_bench_merge_key(bench), row.name, row.method, row.model])
            merged = rows_by_key.setdefault(key, [])
            index = next((n for n, r in enumerate(merged) if not _finished_seeds(r) & _finished_seeds(row)), None)
            if index is None:
                merged.append(row)
            else:
                merged[index] = _merge_rows(merged[index], row)
    return [
        replace(row, runs=tuple(group))
        for merged in rows_by_key.values()
        for row in merged
        for group in group_by_training(row.runs)
    ]


def group_by_training(runs: Iterable[RunResults]) -> list[list[RunResults]]:
    """Group runs that were trained in the same way; runs without a record yet join the first group."""
    groups: list[list[RunResults]] = []
    for run in sorted(runs, key=lambda run: run.record is None):
        group = next((group for group in groups if run.record is None or has_same_training(group[0], run)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return groups


def has_same_training(run: RunResults, other: RunResults) -> bool:
    """Whether two runs were trained in the same way, as far as both records say."""
    components, other_components = _collect_training_components(run), _collect_training_components(other)
    return all(components[name] == other_components[name] for name in components.keys() & other_components.keys())


def get_row_identity(run: RunResults) -> dict[str, Any]:
    """Return what identifies a run's row: its resolved settings without the seed, the most telling ones first."""
    record = run.record or {}
    resolved = {
        "data": record["data"]["name"],
        "model": record["model"]["name"],
        **_identify_threat(record["threat"]),
    }
    settings = {**resolved, **record["request"], **record["settings"], **resolved, "watch": record.get("watch")}
    return {name: value for name, value in settings.items() if name not in NON_IDENTITY_SETTINGS}


def _identify_threat(threat: dict[str, Any]) -> dict[str, Any]:
    if "threats" in threat:
        return {"threat": format_threat(threat), "threat_rule": threat["rule"]}
    return {name: threat[name] for name in ("norm", "eps")}


def collect_code_versions(runs: Iterable[RunResults]) -> set[str]:
    """Collect the versions of the user's own files that runs were trained with."""
    records = [run.record["code"] for run in runs if run.record and run.record.get("code")]
    return {
        " ".join(f"{part} {digest[:DIGEST_PREFIX_CHARS]}" for part, digest in sorted(code.items())) for code in records
    }


def _collect_training_components(run: RunResults) -> dict[str, Any]:
    """What a run's settings resolved to: the parts of its method, the size of its network, its images.

    A file with a method or a network, or a folder of images, may have changed under the same name. If a folder has
    val/, all of train/ is trained on.
    """
    record = run.record or {}
    components = {
        f"{part}.{name}": value
        for part, values in record.get("method", {}).items()
        if isinstance(values, dict)
        for name, value in values.items()
    }
    components |= {name: record.get("data", {}).get(name) for name in ("held_out", "train")}
    components |= {"parameters": record.get("model", {}).get("parameters"), "images": _read_data_digest(run)}
    return {name: value for name, value in components.items() if value is not None}


def _bench_merge_key(bench: BenchResults) -> tuple[str, str]:
    """What pieces of one bench have in common."""
    overrides = bench.settings.get("set")
    if isinstance(overrides, dict):
        overrides = {name: text for name, text in overrides.items() if name not in RESULT_NEUTRAL_SETTINGS}
    return bench.recipe, json.dumps({**bench.settings, "set": overrides}, sort_keys=True)


def _finished_seeds(row: ReportRow) -> set[int]:
    return {run.seed for run in row.finished_runs}


def _merge_rows(row: ReportRow, other: ReportRow) -> ReportRow:
    """Two pieces of a row as one; of a seed in both pieces, the finished run."""
    by_seed = {run.seed: run for run in sorted((*row.runs, *other.runs), key=lambda run: bool(run.metrics))}
    return replace(row, runs=tuple(by_seed[seed] for seed in sorted(by_seed)))


# ---- what a row is called


def assign_unique_names(rows: Sequence[ReportRow]) -> Iterator[ReportRow]:
    """Yield the rows under different names, with as few settings in them as that needs."""
    rows = _drop_shared_model_name(rows)
    taken: set[str] = set()
    for row in rows:
        namesakes = [other for other in rows if other.name == row.name]
        name = make_printable(" ".join([row.name, *_distinguishing_settings(row, namesakes)]))
        number = 1
        while (unique := name if number == 1 else f"{name} ({number})") in taken:
            number += 1
        taken.add(unique)
        yield replace(row, name=unique)


def _drop_shared_model_name(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """The rows without the network's name at the end of each name, if it is the same for all."""
    suffixes = {f" {anonymize_paths(row.model)}" for row in rows}
    suffix = suffixes.pop() if len(suffixes) == 1 else ""
    if not all(row.name.endswith(suffix) for row in rows):
        return list(rows)
    return [replace(row, name=row.name.removesuffix(suffix)) for row in rows]


def _distinguishing_settings(row: ReportRow, namesakes: Sequence[ReportRow]) -> list[str]:
    """The fewest settings that distinguish rows of one name."""
    if any(not other.runs or other.runs[0].record is None for other in namesakes):
        return []
    settings, all_settings = (
        _collect_naming_settings(row.runs[0]),
        [_collect_naming_settings(other.runs[0]) for other in namesakes],
    )
    chosen: list[str] = []
    num_groups = 1
    for name in dict.fromkeys(name for other in all_settings for name in other):
        groups = {tuple(_format_setting(other, n) for n in (*chosen, name)) for other in all_settings}
        if len(groups) > num_groups:
            chosen, num_groups = [*chosen, name], len(groups)
    return [_format_setting(settings, name) for name in chosen]


def _collect_naming_settings(run: RunResults) -> dict[str, Any]:
    """What a row's name may contain: its settings, the data set as requested, and what the settings resolved to."""
    return {
        **get_row_identity(run),
        "requested data": (run.record or {})["request"].get("data"),
        **_collect_training_components(run),
    }


def _format_setting(settings: dict[str, Any], name: str) -> str:
    text = _format_setting_value(name, settings.get(name))
    return text if name in ("model", "data", "requested data", "rules") else f"{name}={text}"


def _format_setting_value(name: str, value: Any) -> str:
    if isinstance(value, float):
        return format_eps(value) if name in ("eps", "alpha") else f"{value:.4g}"
    return "default" if value is None else str(value)[:DIGEST_PREFIX_CHARS] if name == "images" else str(value)


# ---- which rows can be compared


def assign_comparison_groups(rows: Sequence[ReportRow]) -> list[int]:
    """Return for each row the index of the first row that it can be compared with: its own if it has no results."""
    return [
        next((n for n, other in enumerate(rows) if _can_compare_row_pair(row, other)), i) for i, row in enumerate(rows)
    ]


def can_compare_rows(rows: Sequence[ReportRow]) -> bool:
    """Whether all rows were evaluated on the same data set, by the same threat model and attacks, so that one can be the
    best."""
    return len(set(assign_comparison_groups(rows))) < 2


def has_same_test_images(run: RunResults, other: RunResults) -> bool:
    """Whether two runs were evaluated on images of one data set, as far as both records say."""
    if any(read_evaluated_data(r) != _read_requested_data(r) for r in (run, other)):
        return read_evaluated_data(run) == read_evaluated_data(other)
    name, other_name = ((r.record or {}).get("data", {}).get("name") for r in (run, other))
    digests = {digest for r in (run, other) if (digest := _read_data_digest(r))}
    return name == other_name and len(digests) < 2


def describe_test_data(run: RunResults) -> str:
    """Return the name of the data set that a run was evaluated on, with a hash of its images if there is one."""
    name, digest = read_evaluated_data(run), _read_data_digest(run)
    return f"{name} {digest[:DIGEST_PREFIX_CHARS]}" if digest and name == _read_requested_data(run) else name


def read_evaluated_data(run: RunResults) -> str:
    """Return the data set that a run's evaluation names; the run's own if it names none."""
    return read_evaluation_info(run, "data") or _read_requested_data(run)


def read_evaluation_info(run: RunResults, key: str) -> str | None:
    """Return what a run's evaluation says it evaluated, "epoch" or "data"; None if it does not say."""
    info = run.evaluation.settings.get("about", {}) if run.evaluation else {}
    return str(info[key]) if info.get(key) else None


def _can_compare_row_pair(row: ReportRow, other: ReportRow) -> bool:
    return bool(other.finished_runs) and all(
        _can_compare_runs(other.finished_runs[0], run) for run in row.finished_runs
    )


def _can_compare_runs(run: RunResults, other: RunResults) -> bool:
    """Whether two runs' accuracies mean the same: on the same data set, under the same threat model and attacks."""
    threats = [
        (r.evaluation.settings["threat"], r.evaluation.settings.get("task")) for r in (run, other) if r.evaluation
    ]
    return has_same_test_images(run, other) and threats[:1] == threats[1:] and not find_attack_differences([run, other])


def find_attack_differences(runs: Sequence[RunResults]) -> dict[str, dict[str, list[Any]]]:
    """Find attacks that were run under one name with different settings, such as other steps of `--alpha`.

    Args:
        runs: Evaluated runs. Those against different threat models differ anyway, so they are not looked at.

    Returns:
        By attack, the values of each setting that differs.
    """
    settings = [run.evaluation.settings for run in runs if run.evaluation]
    if any(one["threat"] != settings[0]["threat"] for one in settings):
        return {}
    found: dict[str, dict[str, list[Any]]] = {}
    for name in dict.fromkeys(name for one in settings for name in one.get("attacks", {})):
        described = [one["attacks"][name] for one in settings if name in one.get("attacks", {})]
        for key in set.intersection(*map(set, described)) - NEUTRAL_ATTACK_SETTINGS:
            values = {json.dumps(each[key], sort_keys=True): each[key] for each in described}
            if len(values) > 1:
                found.setdefault(name, {})[key] = [values[text] for text in sorted(values)]
    return found


def _read_requested_data(run: RunResults) -> str:
    return str((run.record or {}).get("request", {}).get("data"))


def _read_data_digest(run: RunResults) -> str | None:
    digest = (run.record or {}).get("data", {}).get("digest")
    return digest if isinstance(digest, str) else None
