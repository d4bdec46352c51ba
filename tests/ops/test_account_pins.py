"""`doctor --pin`: what only the region knows goes into the stack file, in one step, and nothing else of it changes."""

from __future__ import annotations

import json
import stat

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import config
import versions
from ops import doctor, pins, target
from ops.errors import BadInput
from tests.ops.account_server import ACCOUNT, json_error, tags, write_stack
from tests.ops.registry import DIGEST, Registry

PINS = {"zone": "us-west-2b", "amiRelease": "1.36.0-20261112", "addonVersions": {"vpc-cni": "v1.20.4-eksbuild.2"}, "imageDigest": "sha256:" + "0" * 64}

COMMENTED = """# our stack
encryptionsalt: v1:abc=
config:
  aws:region: us-west-2   # where the quota is
  # the nodes
  ray-train-efa:gpu: {instanceType: g6.12xlarge, nodes: 2}
  ray-train-efa:huggingFaceToken:
    secure: v1:xyz
  ray-train-efa:budget:
    maxHourlyUsd: 15 # a limit
# the end
"""


def test_only_the_pins_lines_change(tmp_path):
    file = tmp_path / "Pulumi.dev.yaml"
    file.write_text(COMMENTED)
    file.chmod(0o640)
    before, after = pins.write(file, PINS)
    assert before == {}
    assert after == PINS
    text = file.read_text()
    assert [line for line in text.splitlines() if line in COMMENTED.splitlines()] == COMMENTED.splitlines(), "every line, comments included, in its order"
    assert yaml.safe_load(text)["config"][pins.KEY] == PINS
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [file], "no draft is left"
    again = {**PINS, "zone": "us-west-2c"}
    assert pins.write(file, again) == (PINS, again)
    assert file.read_text() == text.replace("us-west-2b", "us-west-2c")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "config:\n  aws:region: us-west-2\n",
        "config:\n  aws:region: us-west-2",
        "config:\n    aws:region: us-west-2\n    ray-train-efa:pins:\n        zone: us-west-2a\n\n    # after\n    ray-train-efa:owner: me\n",
        "config:\n  ray-train-efa:pins: {zone: us-west-2a}\n  ray-train-efa:owner: me\n",
        "config:\n  ray-train-efa:pins: {}\nencryptionsalt: x\n",
        "encryptionsalt: x\n",
        "config:\n  ray-train-efa:training:\n    environment:\n      TEXT: |\n        a\n        b\n",
    ],
)
def test_any_usual_form_of_a_stack_file_can_be_edited(tmp_path, text):
    file = tmp_path / "Pulumi.dev.yaml"
    file.write_text(text)
    pins.write(file, PINS)
    found, whole = yaml.safe_load(file.read_text()), yaml.safe_load(text) or {}
    others = {key: value for key, value in (whole.get("config") or {}).items() if key != pins.KEY}
    assert found["config"] == {**others, pins.KEY: PINS}
    assert {key: value for key, value in found.items() if key != "config"} == {key: value for key, value in whole.items() if key != "config"}


@pytest.mark.parametrize("text", ["{config: {aws:region: us-west-2}}\n", "config: [1]\n", "config: {}\n", "- a\n"])
def test_a_form_that_can_not_be_edited_is_left_as_it_is(tmp_path, text):
    file = tmp_path / "Pulumi.dev.yaml"
    file.write_text(text)
    with pytest.raises((BadInput, AttributeError)):
        pins.write(file, PINS)
    assert file.read_text() == text


scalars = st.one_of(st.integers(-5, 5), st.booleans(), st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=12))
settings = st.dictionaries(
    st.sampled_from([f"ray-train-efa:{key}" for key in ("gpu", "owner", "budget", "ray", "pins")]),
    st.dictionaries(scalars.map(str), scalars, max_size=3),
    max_size=5,
)


@given(found=settings, flow=st.booleans())
def test_whatever_else_stands_in_the_file_stays(tmp_path_factory, found, flow):
    file = tmp_path_factory.mktemp("stack") / "Pulumi.dev.yaml"
    document = {"config": {"aws:region": "us-west-2", "ray-train-efa:storage": {"fsx": {"capacityGiB": 1200}}, **found}}
    text = "config:\n" + "".join(
        "  " + line + "\n" for line in yaml.safe_dump(document["config"], default_flow_style=None if flow else False, allow_unicode=True).splitlines()
    )
    if yaml.safe_load(text) != document:  # a text that this test itself can't indent
        return
    file.write_text(text)
    pins.write(file, PINS)
    assert yaml.safe_load(file.read_text())["config"] == {**document["config"], pins.KEY: PINS}


def test_a_file_that_can_not_be_written_is_a_sentence(tmp_path, monkeypatch):
    file = tmp_path / "Pulumi.dev.yaml"
    file.write_text(COMMENTED)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pins.os, "replace", full)
    with pytest.raises(BadInput, match="No space left on device"):
        pins.write(file, PINS)
    assert file.read_text() == COMMENTED
    assert list(tmp_path.iterdir()) == [file]


def test_of_two_amis_the_older_release_is_taken_for_both():
    assert pins.older({"nvidia": "1.36.0-20261112", "standard": "1.36.1-20261119"}) == "1.36.0-20261112"


@pytest.fixture
def stack(tmp_path, monkeypatch):
    monkeypatch.setattr(target, "ROOT", tmp_path)
    monkeypatch.setattr(doctor.tools, "findings", lambda needs_aws=True: [])
    with Registry({f"team/ray:{versions.IMAGE_TAG}": DIGEST, f"team/ray@{DIGEST}": DIGEST}) as registry:
        monkeypatch.setattr(versions, "IMAGE_REPOSITORY", f"{registry.host}/team/ray")
        write_stack(tmp_path)
        yield tmp_path


def test_doctor_writes_what_the_region_says_and_the_program_takes_it(account, stack):
    report = doctor.examine("dev", pin=True)
    assert report.ok, report.findings
    settings = target.read("dev").settings
    assert settings.pins.ami_release == "1.36.0-20261112", "the older of the two AMIs"
    assert settings.pins.image_digest == DIGEST
    assert settings.pins.addons == dict.fromkeys((*versions.NODE_ADDONS, "coredns"), "v1.20.4-eksbuild.2"), "EKS's default, not its newest"
    assert settings.zone == next(zone.name for zone in report.zones if zone.fits)
    again = doctor.examine("dev", pin=True)
    assert not again.pinned.changed


def test_the_zone_never_moves(account, stack):
    write_stack(stack, {"pins": {"zone": "us-west-2d"}})
    doctor.examine("dev", pin=True)
    assert target.read("dev").settings.zone == "us-west-2d"
    write_stack(stack, {"network": {"zone": "us-west-2a"}})
    doctor.examine("dev", pin=True)
    settings = target.read("dev").settings
    assert (settings.network.zone, settings.pins.zone) == ("us-west-2a", None), "said once"


def test_pins_of_another_kubernetes_do_not_stop_who_writes_new_ones(account, stack):
    write_stack(stack, {"pins": {"amiRelease": "1.35.2-20261001", "zone": "us-west-2b"}})
    with pytest.raises(config.BadInput, match="doctor --pin"):
        target.read("dev")
    report = doctor.examine("dev", pin=True)
    assert report.pinned.before["amiRelease"] == "1.35.2-20261001"
    assert target.read("dev").settings.pins.ami_release == "1.36.0-20261112"
    assert target.read("dev").settings.zone == "us-west-2b"


def test_a_stack_that_can_not_be_built_is_not_pinned(account, stack):
    account.quotas["L-DB2E81BA"] = 0
    before = (stack / "Pulumi.dev.yaml").read_text()
    report = doctor.examine("dev", pin=True)
    assert report.pinned is None
    assert any(finding.what == "nothing was pinned" for finding in report.findings)
    assert (stack / "Pulumi.dev.yaml").read_text() == before


def test_a_lookup_that_is_denied_pins_nothing_rather_than_half(account, stack):
    account.answers["ssm", "GetParameter"] = lambda _: json_error("AccessDeniedException", "no")
    before = (stack / "Pulumi.dev.yaml").read_text()
    report = doctor.examine("dev", pin=True)
    assert not report.ok
    assert any("ssm:GetParameter in us-west-2 is not allowed" in finding.what for finding in report.findings)
    assert (stack / "Pulumi.dev.yaml").read_text() == before


def test_of_a_stack_that_is_up_what_runs_is_pinned_so_that_the_next_up_changes_nothing(account, stack):
    own = {tag["Key"]: tag["Value"] for tag in tags()}
    account.client("eks").create_cluster(name="ray-train-efa-dev", roleArn=f"arn:aws:iam::{ACCOUNT}:role/x", resourcesVpcConfig={}, version="1.36", tags=own)
    path = "GET /clusters/ray-train-efa-dev"

    def answer(document):
        return lambda _: (200, "application/json", json.dumps(document).encode())

    account.answers["eks", f"{path}/node-groups"] = answer({"nodegroups": ["gpu"]})
    account.answers["eks", f"{path}/node-groups/gpu"] = answer({"nodegroup": {"nodegroupName": "gpu", "releaseVersion": "1.36.0-20261001"}})
    for name in (*versions.NODE_ADDONS, "coredns"):
        account.answers["eks", f"{path}/addons/{name}"] = answer({"addon": {"addonName": name, "addonVersion": "v1.0.0-eksbuild.1"}})
    report = doctor.examine("dev", pin=True)
    assert report.pinned.running
    assert report.pinned.after["amiRelease"] == "1.36.0-20261001"
    assert set(report.pinned.after["addonVersions"].values()) == {"v1.0.0-eksbuild.1"}
    assert "1.36.0-20261112 is newer" in report.pinned.notes[0]
