#!/bin/sh
# Start MLflow's tracking server with users and passwords; the artifacts are in S3 alone.
#
#   DATABASE                      address of the database of runs, versions and users
#   ARTIFACT_ROOT                 s3://BUCKET/PREFIX, where clients write directly
#   MLFLOW_AUTH_ADMIN_PASSWORD    first password of the user admin
#   MLFLOW_FLASK_SERVER_SECRET_KEY, MLFLOW_SERVER_ALLOWED_HOSTS: see MLflow's documentation
set -eu
umask 077

# MLflow reads the file with configparser, for which %% is a percent sign.
# Without a workspace grant, a user reads everything and creates nothing; see grant_rights.py.
cat > "${TMPDIR:-/tmp}/auth.ini" <<INI
[mlflow]
default_permission = READ
grant_default_workspace_access = true
database_uri = $(printf '%s' "${DATABASE}" | sed 's/%/%%/g')
admin_username = admin
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
INI

# In the environment and in a file, because every process sees the words of a command.
export MLFLOW_AUTH_CONFIG_PATH="${TMPDIR:-/tmp}/auth.ini"
export MLFLOW_BACKEND_STORE_URI="${DATABASE}"
export MLFLOW_ENABLE_WORKSPACES=true
export MLFLOW_DISABLE_TELEMETRY=true
# These processes evaluate traces, which the project does not have.
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false

exec mlflow server --app-name basic-auth --no-serve-artifacts \
    --default-artifact-root "${ARTIFACT_ROOT}" \
    --host "${HOST:-0.0.0.0}" --port "${PORT:-5000}" --workers "${WORKERS:-4}"
