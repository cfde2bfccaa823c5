"""Settings: values that are accepted, and errors that name the field."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from koalapy.config.settings import (
    OF_LOCAL_KIND,
    OF_OTHER_KINDS,
    ClusterSection,
    Settings,
    load_settings,
    unknown_variables,
)
from koalapy.model.cluster import Link
from koalapy.model.errors import UsageError
from koalapy.model.identity import Role
from koalapy.model.job_spec import ClaimingMode
from koalapy.model.measurement import MeasurementSettings
from koalapy.model.wording import parse_bandwidth, parse_memory, parse_seconds


@pytest.fixture
def load_yaml(tmp_path: Path) -> Any:
    def load_values(**values: Any) -> Settings:
        path = tmp_path / "koala.yaml"
        path.write_text(yaml.safe_dump(values))
        return load_settings(path)

    return load_values


OUT_OF_RANGE: dict[str, list[object]] = {
    "jobs_keep": [0, -1, 3599, float("nan"), float("inf"), "never"],
    "internal_jobs_keep": [0, 3599, None],
    "rules.claim_factor": [0, 1],
    "rules.claim_factor_min": [0.9],
    "rules.claim_factor_step": [-0.1],
    "rules.claim_threshold": [1.01, float("nan")],
    "rules.claim_epsilon": [-1],
    "rules.high_scans_per_low": [0],
    "rules.plan_after": [-1],
    "rules.max_claiming_tries": [0],
    "rules.probation_pause": [0, float("inf")],
    "rules.probation_pause_max": [-1],
    "rules.max_restarts": [-1],
    "rules.restart_pause": [-1],
    "rules.claiming": ["sometimes"],
    "rules.preemption": ["always"],
    "rules.claim_factr": [0.5],
    "network.interval": [1, "soon"],
    "network.stale_after": [0],
    "network.parallel": [0],
    "network.patience": [float("nan")],
    "network.command": [[]],
    "network.patiens": [1],
    "clusters.north.transfer_limit": [0, 65, "many"],
    "clusters.north.forget_after": [0, float("inf")],
    "limits.default.nodes": [-1],
    "limits.default.node_hours_per_day": [float("inf")],
    "limits.users.alice.nodse": [1],
    "limits.groups.g.requests_per_second": [0],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in OUT_OF_RANGE for value in OUT_OF_RANGE[field]]
)
def test_setting_out_of_range_is_refused_by_its_field(load_yaml: Any, field: str, value: object) -> None:
    values: Any = value
    for name in reversed(field.split(".")):
        values = {name: values}
    with pytest.raises(UsageError) as refusal:
        load_yaml(**values)
    assert refusal.value.field == field
    assert f"koala.yaml: {field}" in refusal.value.message


def test_jobs_keep_accepts_zero_and_an_hour(load_yaml: Any) -> None:
    assert load_yaml(jobs_keep=None).jobs_keep is None
    assert load_yaml(internal_jobs_keep=3600).internal_jobs_keep == 3600.0


def test_environment_accepts_objects_and_lists_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "NETWORK__COMMAND": '["pp"]',
        "CLUSTERS__NORTH__KIND": "slurm",
        "CLUSTERS__NORTH__MODULES": '["openmpi"]',
        "CLUSTERS__NORTH__TOKEN": "1234567890123456789012",
        "CLUSTERS__NORTH__MPI__SERIES": "4",
        "CLUSTERS__NORTH__MPI__PARAMETERS": '{"a": "b"}',
        "RULES__CLAIMING": "incremental",
        "LINKS": '[{"between": ["north", "north"], "latency": "1ms"}]',
    }.items():
        monkeypatch.setenv(f"KOALA_{name}", value)
    settings = load_settings(None)
    north = settings.clusters["north"]
    assert settings.network.command == ("pp",)
    assert (north.modules, north.token, north.mpi.series) == (["openmpi"], "1234567890123456789012", 4)
    assert north.mpi.parameters == {"a": "b"}
    assert settings.rules.claiming is ClaimingMode.INCREMENTAL
    assert settings.known_links() == {("north", "north"): Link(0.001)}


def test_rules_are_read_from_file(load_yaml: Any) -> None:
    rules = {"claiming": "incremental", "claim_threshold": 0.5, "claim_factor": 0.5, "preemption": "never"}
    built = load_yaml(rules=rules).rules
    assert {name: getattr(built, name) for name in rules} == rules


def test_rules_in_environment_out_of_range_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KOALA_RULES__CLAIM_FACTOR", "1.5")
    place = "KOALA_RULES__CLAIM_FACTOR in the environment"
    with pytest.raises(UsageError, match=rf"^{place}: rules\.claim_factor: give less than 1$"):
        load_settings(None)


def test_known_links_are_keyed_by_clusters(load_yaml: Any) -> None:
    settings = load_yaml(
        links=[
            {"between": ["south", "north"], "latency": "0.5ms", "bandwidth": "1Gbit"},
            {"between": ["north", "north"], "latency": 0.0001},
        ]
    )
    assert settings.known_links() == {("north", "south"): Link(0.0005, 125e6), ("north", "north"): Link(0.0001, None)}


@pytest.mark.parametrize(
    ("text", "seconds"), [(2, 2.0), (0.5, 0.5), ("3", 3.0), ("0.5ms", 0.0005), ("20 us", 2e-5), ("1e-3s", 1e-3)]
)
def test_duration_with_unit_is_parsed(text: float | str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "amount"),
    [(10, 10.0), ("7", 7.0), ("1Gbit", 125e6), ("1Gbit/s", 125e6), ("100MB", 1e8), ("2 KiB/s", 2048.0), ("8bit", 1.0)],
)
def test_bandwidth_with_unit_is_parsed(text: float | str, amount: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(amount)


@pytest.mark.parametrize(
    ("text", "size"), [(2**30, 2**30), (0, 0), ("16GB", 16 * 10**9), ("1.5 kB", 1500), ("512MiB", 2**29), ("2B", 2)]
)
def test_memory_with_unit_is_parsed(text: float | str, size: int) -> None:
    assert parse_memory(text) == size


WRONG_AMOUNTS: list[tuple[Any, str, list[Any]]] = [
    (parse_memory, "give 64GB or 64MB", ["64", 64]),
    (parse_memory, "give 1.5GB or 1.5MB", [" 1.5 "]),
    (parse_memory, "give 64", ["64000000000"]),
    (
        parse_memory,
        "give a number with a unit",
        ["", "GB", "16G", "8bit", "1GB/s", "-1", True, float("inf"), float("nan"), "9e999"],
    ),
    (parse_seconds, "give seconds", ["", "ms", "1h", "1 0ms", "nan", "-1s", "1ms/s", True]),
]


def test_invalid_amount_is_rejected_with_a_hint() -> None:
    for parse, hint, texts in WRONG_AMOUNTS:
        for text in texts:
            with pytest.raises(ValueError, match=hint):
                parse(text)


def test_measure_settings_of_links_are_read(load_yaml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_yaml().network == MeasurementSettings()
    assert load_yaml(network={"interval": 3600, "command": ["pp"]}).network.command == ("pp",)
    monkeypatch.setenv("KOALA_NETWORK__PATIENCE", "5")
    assert load_yaml().network.patience == 5.0


def test_token_is_read_with_its_role_and_not_shown(load_yaml: Any) -> None:
    section = load_yaml(tokens=[{"token": "a-token-for-tests", "user": "ada", "role": "operator"}]).tokens[0]
    assert (section.user, section.role) == ("ada", Role.OPERATOR)
    assert "a-token" not in repr(section)


def test_user_accounts_must_be_unique_on_known_clusters(load_yaml: Any) -> None:
    people = {"ada": {"accounts": {"north": "al"}, "groups": ["physics"]}, "bob": {"accounts": {"north": "bo"}}}
    settings = load_yaml(
        users=people, clusters={"north": {}, "south": {"kind": "slurm", "unmapped": True}}
    ).known_users()
    assert settings.user_of("north", "al") == "ada"
    assert (settings.user_of("north", "eve"), settings.user_of("south", "eve")) == (None, "eve@south")
    assert [settings.account_of("ada", name) for name in ("north", "south")] == ["al", None]
    assert [settings.account_of("eve@south", name) for name in ("north", "south")] == [None, "eve"]
    at_home = load_yaml(users={"ada": {"accounts": {"north": "al", "south": "al"}, "home": "south"}}).known_users()
    assert at_home.home_of("ada") == "south"
    with pytest.raises(UsageError, match=r"users.ada.home is nort, and there is no such cluster"):
        load_yaml(users={"ada": {"home": "nort"}}).known_users()
    with pytest.raises(UsageError, match="belongs to both ada and bob"):
        load_yaml(users=people | {"bob": {"accounts": {"north": "al"}}}).known_users()
    with pytest.raises(UsageError, match="there is no cluster nort"):
        load_yaml(users={"ada": {"accounts": {"nort": "al"}}}).known_users()
    with pytest.raises(UsageError, match="is not a user's name"):
        load_yaml(users={"ada@north": {}})


def test_invalid_token_in_environment_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KOALA_TOKENS", '[{"token": "", "user": "ada"}]')
    with pytest.raises(UsageError, match=r"^KOALA_TOKENS in the environment: tokens\[0\]\.token: the token is blank"):
        load_settings(None)
    monkeypatch.setenv("KOALA_TOKENS", "a-token-for-tests")
    with pytest.raises(UsageError, match="environment variables as JSON"):
        load_settings(None)


def test_error_lists_all_faults_with_nearest_keys_and_file(tmp_path: Path) -> None:
    path = tmp_path / "koala.yaml"
    path.write_text(
        "rules: {claim_grce: 5, scan_intervall: 1}\n"
        "clusters: {north: {node: 3, transfer_limit: 0}}\n"
        "links: [{between: [north, north], latencey: 1}]\nzzz: 1\n"
    )
    with pytest.raises(UsageError) as refused:
        load_settings(path)
    message = refused.value.message.removeprefix(f"{path}: ")
    assert message.split("; ") == [
        "rules.claim_grce: there is no such key, did you mean claim_grace?",
        "rules.scan_intervall: there is no such key, did you mean scan_interval?",
        "links[0].latencey: there is no such key, did you mean latency?",
        "clusters.north.transfer_limit: give at least 1",
        "clusters.north.node: there is no such key, did you mean nodes?",
        *[part for part in message.split("; ") if part.startswith("zzz: there is no such key (known: ")],
    ]
    assert refused.value.hint == "correct it there"
    path.write_text("rules: {aging: false, aging_tries: 3, low_patience: null}\n")
    with pytest.raises(UsageError) as refused:
        load_settings(path)
    assert refused.value.message.removeprefix(f"{path}: ").split("; ") == [
        f"rules.{name}: this setting is no more, set rules.plan_after in its place"
        for name in ("aging", "aging_tries", "low_patience")
    ]
    path.write_text("rules: {claim_grace: 0, claim_factor: 2}\n")
    with pytest.raises(UsageError) as refused:
        load_settings(path)
    assert refused.value.message == (
        f"{path}: rules.claim_grace: give at least 0.001; rules.claim_factor: give less than 1"
    )


def test_error_names_the_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "koala.yaml"
    path.write_text("lease: 0\n")
    monkeypatch.setenv("KOALA_RULES__CLAIM_GRCE", "5")
    monkeypatch.setenv("KOALA_TOKENS", '[""]')
    with pytest.raises(UsageError) as refused:
        load_settings(path)
    places = refused.value.message.partition(": ")[0].split(" and ")
    assert sorted(places) == sorted(
        [str(path), "KOALA_RULES__CLAIM_GRCE in the environment", "KOALA_TOKENS in the environment"]
    )


OIDC = {"issuer": "https://sso.example.org", "audience": "koala", "jwks_uri": "https://sso.example.org/jwks"}


def test_identity_provider_on_loopback_may_use_http(load_yaml: Any) -> None:
    for uri in ("http://127.0.0.1:8080/jwks", "http://[::1]/jwks", "http://localhost/jwks"):
        assert load_yaml(oidc=OIDC | {"pattern": "(.+)", "jwks_uri": uri}).oidc is not None


@pytest.mark.parametrize("name", ["north", "é", "4", "das4-vu.nl_2", "x" * 100])
def test_valid_cluster_name_is_accepted(load_yaml: Any, name: str) -> None:
    assert list(load_yaml(clusters={name: {}}).clusters) == [name]


LINK = "{between: [north, south], latency: 0.001}"
SSO = "issuer: https://sso.example.org, audience: koala"
KEYS = "jwks_uri: https://sso.example.org/jwks"
WRONG = {
    "1: 2": "is not the name of a setting",
    "_env_prefix: X_": "is not the name of a setting",
    "_env_file: /etc/passwd": "is not the name of a setting",
    "null: 1": "is not the name of a setting",
    "[1, 2]: 3": "cannot read",
    "jobs_keep: 2026-13-45": "cannot read",
    f"jobs_keep: {'9' * 5000}": "cannot read",
    "jobs_keep: !!bool x": "cannot read",
    f"jobs_keep: {'1:' * 200}1.0": "cannot read",
    "clusters:\n  y: {nodes: 2}\n  y: {nodes: 3}": "the key 'y' is given twice, in lines 2 and 3: leave one out",
    "rules: 5": "rules: not an object, give names and values",
    "clusters: [a]": "clusters: not an object, give names and values",
    "clusters: {1: {}}": "clusters: not a text, write it as a text, in quotes",
    "links: x": "links: not a list, give a list",
    "jobs_keep: x": "jobs_keep: not a number, give a number",
    "jobs_keep: 1": "jobs_keep: give at least 3600",
    "lease: 0": "lease: give more than 0 seconds, or none",
    "bundle_limit: 1.5": "bundle_limit: not an integer, give a whole number",
    "open_metrics: maybe": "open_metrics: neither true nor false, use true or false",
    "rules: {claiming: nix}": "rules.claiming: use 'atomic' or 'incremental'",
    "log_level: loud": "log_level: use 'debug', 'info', 'warning', 'error' or 'critical'",
    "links: [{latency: 1}]": "links[0].between: it is missing, add it",
    "limits_contact: [1]": "limits_contact: not a text, write it as a text, in quotes",
    "tokens: [{token: 1234567890123456, user: ada}]": "tokens[0].token: not a text, write it as a text, in quotes",
    "tokens: [a-token-for-tests]": "tokens[0]: a token needs a user and a role",
    "tokens: [{token: a-token-for-tests, user: ada, rol: admin}]": "tokens[0].rol: there is no such key, did you mean",
    'clusters: {north: {scratch: "/a\\ud800"}}': "clusters.north.scratch: ",
    'clusters: {north: {environment: {A: "\\udfff"}}}': "clusters.north.environment.A: ",
    'database: "sqlite:///\\ud800"': "database: ",
    'network: {command: ["\\ud800"]}': "network.command[0]: ",
    'clusters: {north: {mpi: {prefix: "\\ud800"}}}': "clusters.north.mpi.prefix: ",
    f"links: [{LINK}, {{between: [north, nroth], latency: 1}}]": "links[1].between[1]: there is no cluster nroth",
    f"links: [{LINK}, {{between: [south, north], latency: 1}}]": "links[1].between: the link between north and south",
    "links: [{between: [north]}]": "links[0].between",
    "links: [{between: [north, south], latency: null}]": "links[0]: neither latency nor bandwidth is given",
    "links: [{between: [north, south], latencey: 1}]": "links[0].latencey: there is no such key",
    **{
        f"links: [{{between: [north, south], {change}}}]": f"links[0].{change.partition(':')[0]}: {says}"
        for change, says in {
            "latency: 0": "give more than 0",
            "latency: -1": "give more than 0",
            "latency: soon": "",
            "latency: true": "",
            "bandwidth: 0.0": "give more than 0",
            "bandwidth: 1Gb": "",
            "bandwidth: -5MB": "",
            "bandwidth: .inf": "no finite number",
        }.items()
    },
    **{
        f"{place.format(repr(token))}": f"{place.partition(':')[0]}"
        for place in ("tokens: [{{token: {}, user: bob}}]", "clusters: {{north: {{token: {}}}}}")
        for token in ("", "  ", "secret", "a b" * 10, "ü" * 20)
    },
    **{
        f'allowed_hosts: [grid.example.org, "{name}"]': "allowed_hosts[1]: "
        for name in ("", "http://grid", "grid:8642", "a b", "*", "grid..org", "/", "[::1]")
    },
    **{
        f"oidc: {{{SSO}, {section}}}": says
        for section, says in {
            KEYS: "oidc: give users or pattern",
            f"users: {{a: alice}}, {KEYS}, jwks_file: /keys": "oidc: give jwks_uri or jwks_file",
            "users: {a: alice}": "oidc: give jwks_uri or jwks_file",
            "users: {a: alice}, jwks_uri: 'http://sso.example.org/'": "oidc.jwks_uri: ",
            "users: {a: alice}, jwks_uri: 'http://127.0.0.1.example.org/'": "oidc.jwks_uri: ",
            "users: {a: alice}, jwks_uri: 'file:///etc/keys'": "oidc.jwks_uri: ",
            f"users: {{a: alice@north}}, {KEYS}": "oidc.users",
            f"pattern: '(.+', {KEYS}": "oidc.pattern: ",
            f"pattern: '.+', {KEYS}": "oidc.pattern: ",
            f"pattern: '(.+)', claim: name, {KEYS}": "oidc.claim: ",
            f"pattern: '(.+)', roles: {{ops: operator}}, {KEYS}": "oidc: give role_claim and roles",
            f"pattern: '(.+)', role_claim: groups, roles: {{ops: root}}, {KEYS}": "oidc.roles.ops: ",
        }.items()
    },
    **{
        f"clusters: {{{name!r}: {{}}}}": f"clusters: {name[:100]!r} is not a cluster's name: give 1 to 100 letters"
        for name in ("", ".", "..", "../x", "a/b", "a,b", "a:b", "no rth", "-x", "_x", ".x", "x" * 101)
    },
    **{
        f"clusters: {{y: {{network: '{network}'}}}}": "clusters.y.network: "
        for network in ("10.0.0", "127.0", "127.0.256", "127.0.0.1", "127.0.x")
    },
    "fair_share: {users: {ada: -1}}": "fair_share.users.ada: give at least 0",
    "fair_share: {half_life: 0}": "fair_share.half_life: give at least 60",
}
"""Configurations, with the error of each."""


@pytest.mark.parametrize("text", WRONG)
def test_wrong_configuration_is_rejected_with_its_field(tmp_path: Path, text: str) -> None:
    path = tmp_path / "koala.yaml"
    path.write_text(f"{text}\n")
    with pytest.raises(UsageError) as refusal:
        load_settings(path).known_links()
    assert WRONG[text] in refusal.value.message


def test_endless_configuration_file_is_rejected() -> None:
    with pytest.raises(UsageError) as refusal:
        load_settings(Path("/dev/zero"))
    assert refusal.value.message == "cannot read /dev/zero: it is larger than 16777216 bytes"


def test_local_networks_without_setting_are_numbered_and_avoid_named_ones(load_yaml: Any) -> None:
    clusters: dict[str, Any] = {
        "a": {},
        "b": {"network": "127.0.1"},
        "c": {"kind": "slurm"},
        "d": {"network": "127.00.007"},
        "e": {},
    }
    networks = load_yaml(clusters=clusters).local_networks()
    assert networks == {"a": "127.0.2", "b": "127.0.1", "d": "127.0.7", "e": "127.0.5"}


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.none() | st.sampled_from(["127.0.1", "127.0.2", "127.0.3"])))
def test_local_networks_are_distinct_or_rejected(networks: dict[str, str | None]) -> None:
    clusters = {name: {} if network is None else {"network": network} for name, network in networks.items()}
    settings = Settings.model_validate({"clusters": clusters})
    configured = [network for network in networks.values() if network]
    if len(configured) == len(set(configured)):
        assert len(set(settings.local_networks().values())) == len(networks)
    else:
        with pytest.raises(UsageError, match="is also the network of cluster"):
            settings.local_networks()


@pytest.mark.parametrize(
    "section", [{"partition": "batch", "nodes": 4}, {"token": "a-token-of-sixteen"}, {"mpi": {"series": 4}}]
)
def test_cluster_without_kind_that_may_be_elsewhere_is_refused(load_yaml: Any, section: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"clusters\.y\.kind is missing"):
        load_yaml(clusters={"y": section})
    assert load_yaml(clusters={"y": section | {"kind": "slurm"}}).clusters["y"].kind == "slurm"


def test_cluster_kind_may_come_from_environment(load_yaml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KOALA_CLUSTERS__Y__KIND", "slurm")
    assert load_yaml(clusters={"y": {"partition": "batch"}}).clusters["y"].kind == "slurm"
    monkeypatch.setenv("KOALA_CLUSTERS__Z__PARTITION", "batch")
    with pytest.raises(UsageError, match=r"clusters\.z\.kind is missing"):
        load_yaml(clusters={"y": {"partition": "batch"}})


@pytest.mark.parametrize("section", [{}, {"nodes": 2, "token": "a-token-of-sixteen"}, {"network": "127.0.9"}])
def test_cluster_without_kind_with_nodes_of_this_machine_is_local(load_yaml: Any, section: dict[str, Any]) -> None:
    assert load_yaml(clusters={"y": section}).clusters["y"].kind == "local"


def test_settings_of_other_cluster_kinds_are_accepted() -> None:
    names = {field.name for field in dataclasses.fields(ClusterSection)}
    assert names >= OF_OTHER_KINDS | OF_LOCAL_KIND


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("KOALA_HIGH_PRIORTY", "KOALA_HIGH_PRIORITY"),
        ("KOALA_RULE__CLAIM_GRACE", "KOALA_RULES__CLAIM_GRACE"),
        ("koala_databse", "KOALA_DATABASE"),
    ],
)
def test_variable_like_a_setting_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, meant: str) -> None:
    monkeypatch.setenv(variable, "operator")
    with pytest.raises(UsageError, match="is not a setting") as refusal:
        load_settings(None)
    assert (refusal.value.field, refusal.value.hint) == (variable, f"did you mean {meant}? Correct it, or unset it")


def test_variable_that_nothing_reads_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = unknown_variables()
    for name in (
        "KOALA_TOKEN",
        "KOALA_JOB",
        "KOALA_NODE_INDEX",
        "KOALA_TRANSLATED",
        "KOALA_RULES__CLAIM_GRACE",
        "KOALA_SITE_OWN",
    ):
        monkeypatch.setenv(name, "5")
    assert unknown_variables() == sorted({*earlier, "KOALA_SITE_OWN"})
    load_settings(None)
