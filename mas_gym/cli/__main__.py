"""Entry point of ``python -m mas_gym.cli``, for use when the script ``mas-gym`` is not on the path."""

from mas_gym.cli import main

if __name__ == "__main__":
    main()
