"""Give the three users of an MLflow server their passwords and rights: `grant_rights.py MODEL`.

| user       | who                                             | rights                         |
|------------|-------------------------------------------------|--------------------------------|
| `train`    | the flow Retrain; RLHF until `evaluate_win_rate` | read all; log runs of the flow |
| `register` | `register` and `end`; who promotes by hand      | also versions, aliases, history |
| `consumer` | services that load the champion                 | read all; log served answers   |

The administrator runs it once for each registered model, and again after a password has changed.
It reads MLFLOW_TRACKING_URI, the administrator's MLFLOW_TRACKING_USERNAME and
MLFLOW_TRACKING_PASSWORD, and the passwords TRAIN_PASSWORD, REGISTER_PASSWORD and CONSUMER_PASSWORD.
The server needs the configuration that `server.sh` writes.
"""

import os
import sys

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.server.auth.client import AuthServiceClient

EXPERIMENT = "rlhf"
"""Name of the experiment of the flow, as in flows/pipeline/tracking/mlflow_client.py."""

SERVED = "-served"
"""End of the name of the experiment of served answers, as in flows/serving/answer_traces.py."""

DESCRIPTION = (
    "Policies registered by flows/rlhf.py. The alias champion names the one in use; who became "
    "champion, when and why is in the experiment promotions of "
)
"""Beginning of a registered model's description, as in pipeline/registry/register_version.py."""

WORKSPACE = "default"
"""MLflow's workspace of all experiments and models whose creator names none."""

USERS = ("train", "register", "consumer")


def grant_rights(model: str, passwords: dict[str, str]) -> None:
    """Create the users, the experiments and the registered model, and grant the rights.

    What exists already is kept; passwords are replaced.

    Args:
        model: name of the registered model.
        passwords: password of each of USERS.

    Raises:
        MlflowException: the server does not answer, or refuses the administrator.
    """
    uri = os.environ["MLFLOW_TRACKING_URI"]
    server, client = AuthServiceClient(uri), MlflowClient(uri)
    experiment = _find_experiment(client, EXPERIMENT)
    served = _find_experiment(client, f"{model}{SERVED}")
    _create_model(client, model)
    # Grant this right, too: without it, the right to an experiment includes its models.
    reads_models = ("logged_model", "*", "READ")
    rights = {
        "train": {("experiment", experiment, "EDIT"), reads_models},
        "register": {
            ("experiment", experiment, "MANAGE"),
            ("registered_model", model, "MANAGE"),
            # Whoever may use the workspace may create experiments, such as that of the history.
            ("workspace", "*", "USE"),
        },
        # All users may read.
        "consumer": {("experiment", served, "EDIT"), reads_models},
    }
    for user, password in passwords.items():
        _create_user(server, user, password)
        _grant(server, user, rights[user])


def _create_user(server: AuthServiceClient, user: str, password: str) -> None:
    try:
        server.create_user(user, password)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        server.update_user_password(user, password)


def _grant(server: AuthServiceClient, user: str, rights: set[tuple[str, str, str]]) -> None:
    """Give a user a role of the same name with these rights; rights that it has are kept."""
    roles = {role.name: role for role in server.list_roles(WORKSPACE)}
    role = roles.get(user) or server.create_role(WORKSPACE, user)
    had = server.list_role_permissions(role.id)
    for right in rights - {
        (one.resource_type, one.resource_pattern, one.permission) for one in had
    }:
        server.add_role_permission(role.id, *right)
    if user not in [one.name for one in server.list_user_roles(user)]:
        server.assign_role(user, role.id)


def _find_experiment(client: MlflowClient, name: str) -> str:
    """Return the id of an experiment, which is created if needed."""
    found = client.get_experiment_by_name(name)
    return found.experiment_id if found else client.create_experiment(name)


def _create_model(client: MlflowClient, name: str) -> None:
    try:
        client.create_registered_model(name, description=f"{DESCRIPTION}{name}.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    grant_rights(sys.argv[1], {user: os.environ[f"{user.upper()}_PASSWORD"] for user in USERS})
