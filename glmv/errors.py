"""What a user sees when a file, a config or a cluster is not as it must be."""


class GlmvError(Exception):
    """A fault in the user's input, told in one message: what, where, why, and the way out.

    The command line prints the message once, without a traceback, and exits with `exit_code`.
    """

    exit_code = 2
