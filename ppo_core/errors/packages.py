"""Optional packages: the error that names the extra of this project to install."""

from importlib.util import find_spec

from ppo_core.errors import ConfigError, PPOError


def require_package(
    package: str, *, extra: str, needed_by: str, kind: type[PPOError] = ConfigError
) -> None:
    """Raise if a package is not installed; the package is not imported.

    Args:
        package: name of the package, as it is imported.
        extra: extra of this project that installs the package.
        needed_by: what needs the package; the beginning of the message.
        kind: class of the error.

    Raises:
        kind: the package is not installed.
    """
    if find_spec(package) is None:
        raise kind(
            f"{needed_by} needs the package {package}, which is not installed: pip install "
            f"'rlhf-flow[{extra}]'."
        )
