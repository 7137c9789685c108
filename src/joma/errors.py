"""The error of a user's mistake, told apart from a defect of this package.

Every other room may import this module; it imports none.
"""


class JomaError(ValueError):
    """Raised for input, files or settings that cannot be used.

    The message is one sentence that names what was given and what would be right. The command line
    prints it and exits with code 2. Any other exception is a defect of this package.
    """
