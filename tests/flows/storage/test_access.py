"""Before a run, a small object is written, read and removed in its store."""

from uuid import uuid4

import pytest
from botocore.exceptions import CredentialRetrievalError

from pipeline.storage.access import check_store
from pipeline.storage.addresses import S3Address
from pipeline.storage.objects import list_objects
from pipeline.storage.s3_client import repeated, s3_client
from ppo_core.errors import ConfigError, StorageError
from tests.helpers.servers.s3_faults import S3Faults
from tests.helpers.servers.servers import BUCKET


def test_a_store_that_may_be_written_is_left_as_it_was(faults: S3Faults):
    store = S3Address.parse(f"s3://{BUCKET}/{uuid4()}")
    check_store(store)
    assert faults.received > 0
    assert list_objects(store) == []


def test_a_store_that_refuses_is_named_with_the_next_move(faults: S3Faults):
    faults.kinds, faults.share = ("403",), 1.0
    store = S3Address.parse(f"s3://{BUCKET}/{uuid4()}")
    with pytest.raises(ConfigError, match="Give the role of this step access"):
        check_store(store)


def test_a_bucket_that_does_not_exist_is_named(faults: S3Faults):
    with pytest.raises(ConfigError, match="Create the bucket"):
        check_store(S3Address.parse(f"s3://gone-{uuid4()}/runs"))


def test_faults_that_pass_are_survived_and_lasting_ones_are_no_wrong_setting(faults: S3Faults):
    store = S3Address.parse(f"s3://{BUCKET}/{uuid4()}")
    faults.kinds, faults.share = ("503", "lost"), 0.3
    check_store(store)
    faults.share = 0.0
    assert list_objects(store) == []
    faults.kinds, faults.share = ("503",), 1.0
    with pytest.raises(StorageError):
        check_store(store)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("AWS_PROFILE", "nobody", r"The config profile \(nobody\) could not be found"),
        ("AWS_ENDPOINT_URL_S3", "localhost:9000", "Invalid endpoint: localhost:9000"),
    ],
)
def test_a_wrong_aws_configuration_is_named(
    variable: str, value: str, message: str, faults: S3Faults, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(variable, value)
    s3_client.cache_clear()
    with pytest.raises(ConfigError, match=f"{message}. Correct the environment variable or the"):
        check_store(S3Address.parse(f"s3://{BUCKET}/runs"))


def test_credentials_that_are_not_there_at_once_are_asked_for_again(faults: S3Faults):
    failures = [CredentialRetrievalError(provider="container-role", error_msg="timed out")] * 2

    def call() -> str:
        if failures:
            raise failures.pop()
        return "answer"

    assert repeated(S3Address.parse(f"s3://{BUCKET}/runs"), call) == "answer"
