"""`roundpipe-plan` in this process."""

import pytest


@pytest.fixture
def command(plan_command):
    """Runs it with its arguments: exit code, standard output, standard error."""
    return plan_command


@pytest.fixture
def refused(command):
    """Runs it with arguments that are a mistake: it answers with one line that has ``message``, which is returned."""

    def call(message, *arguments):
        code, out, err = command(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
        return err

    return call
