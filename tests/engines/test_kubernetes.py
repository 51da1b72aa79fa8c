"""The manifests of deploy/kubernetes, held against the schemas of Kubernetes.

It wants kubernetes-validate.
"""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))

validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
yaml = pytest.importorskip("yaml")


def check(text):
    for manifest in yaml.safe_load_all(text):
        validator.validate(manifest, validator.latest_version(), strict=True)


def test_there_are_a_service_and_two_jobs_that_find_each_other():
    service, learner, actors = (
        yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
        for name in ("service", "learner", "actors")
    )
    assert len(MANIFESTS) == 3
    assert [each["kind"] for each in (service, learner, actors)] == ["Service", "Job", "Job"]
    labels = learner["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    name = service["metadata"]["name"]
    data, weights = (port["port"] for port in service["spec"]["ports"])
    (of_learner,), (of_actors,) = (
        [container["command"] for container in job["spec"]["template"]["spec"]["containers"]]
        for job in (learner, actors)
    )
    assert f"--learner=tcp://{name}:{data}" in of_actors
    for key, value in (
        ("data", f"tcp://0.0.0.0:{data}"),
        ("weights", f"tcp://0.0.0.0:{weights}"),
        ("host", name),
    ):
        assert f"--set=bind.{key}={value}" in of_learner


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_is_valid(path):
    check(path.read_text())


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("actors", "parallelism: 8", "parallelism: many"),
        ("actors", "restartPolicy:", "restartPolicies:"),
        ("learner", "operator: In, ", ""),
        ("service", "port: 5555", "number: 5555"),
    ],
)
def test_one_that_is_broken_is_refused(name, right, wrong):
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.count(right) == 1
    with pytest.raises(validator.ValidationError):
        check(text.replace(right, wrong))
