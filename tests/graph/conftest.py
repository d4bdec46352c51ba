import pytest

pytest.importorskip("pulumi_aws", reason="the Pulumi program's environment is .venv-pulumi (see requirements.txt)")


def pytest_configure(config: pytest.Config) -> None:
    # Classes of pulumi_eks that this project does not use warn when the package is imported.
    config.addinivalue_line("filterwarnings", "ignore:NodeGroup uses AWS EC2 LaunchConfiguration:DeprecationWarning")
