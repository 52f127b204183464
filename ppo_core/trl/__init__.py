"""Scripts of TRL's users: other people's names, arguments and loops, translated into ours."""
