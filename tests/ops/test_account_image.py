"""An image's digest from a real registry on this machine, and from ECR."""

from __future__ import annotations

import hashlib

import pytest

from ops import image
from ops.aws import Aws
from ops.errors import Refused
from tests.ops.account_server import ACCOUNT, json_error, plain_json
from tests.ops.registry import DIGEST, Registry


@pytest.mark.parametrize(
    ("text", "registry", "repository", "wanted"),
    [
        ("public.ecr.aws/deep-learning-containers/ray:v1", "public.ecr.aws", "deep-learning-containers/ray", "v1"),
        (f"public.ecr.aws/a/ray@{DIGEST}", "public.ecr.aws", "a/ray", DIGEST),
        (f"public.ecr.aws/a/ray:v1@{DIGEST}", "public.ecr.aws", "a/ray", DIGEST),
        ("localhost:5000/ray", "localhost:5000", "ray", "latest"),
        ("ubuntu", "registry-1.docker.io", "library/ubuntu", "latest"),
        ("lab/ray-train:dev", "registry-1.docker.io", "lab/ray-train", "dev"),
    ],
)
def test_references_are_read_as_docker_reads_them(text, registry, repository, wanted):
    found = image.parse(text)
    assert (found.registry, found.repository, found.wanted) == (registry, repository, wanted)


def test_a_tag_has_a_digest_after_the_anonymous_sign_in():
    with Registry({"team/ray:v1": DIGEST}) as registry:
        assert image.digest(f"{registry.host}/team/ray:v1") == DIGEST
        assert any(path.startswith("/token?service=test&scope=repository") for path in registry.asked)


def test_a_pinned_digest_that_is_there_is_itself():
    with Registry({f"team/ray@{DIGEST}": DIGEST}) as registry:
        assert image.digest(f"{registry.host}/team/ray@{DIGEST}") == DIGEST


def test_a_registry_that_names_no_digest_has_it_computed():
    with Registry({"team/ray:v1": DIGEST}, "quiet") as registry:
        assert image.digest(f"{registry.host}/team/ray:v1") == "sha256:" + hashlib.sha256(b'{"schemaVersion": 2}').hexdigest()


@pytest.mark.parametrize(
    ("mode", "says"), [("token", "has no v9; correct ray.image"), ("closed", "may not be read without signing in"), ("busy", "too many requests")]
)
def test_what_a_registry_refuses_is_a_sentence(mode, says):
    with Registry({}, mode) as registry, pytest.raises(Refused, match=says):
        image.digest(f"{registry.host}/team/ray:v9")


def test_a_registry_that_does_not_answer_is_unreachable():
    with pytest.raises(image.Unreachable, match="can't be reached"):
        image.digest("127.0.0.1:9/team/ray:v1")


def test_an_image_in_ecr_is_asked_of_ecr(account):
    account.answers["ecr", "DescribeImages"] = lambda call: plain_json({"imageDetails": [{"imageDigest": DIGEST}]}) if call.region == "eu-west-1" else None
    assert image.digest(f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com/ray:v1", Aws("us-west-2")) == DIGEST


def test_an_image_that_ecr_does_not_have_is_a_sentence(account):
    account.answers["ecr", "DescribeImages"] = lambda _: json_error("ImageNotFoundException", "no")
    with pytest.raises(Refused, match="has no image v1 in ray; push it there"):
        image.digest(f"{ACCOUNT}.dkr.ecr.us-west-2.amazonaws.com/ray:v1", Aws("us-west-2"))
