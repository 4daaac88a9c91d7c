"""What lazyshard's protocol needs of a filesystem that two mounts or two machines share, and whether that holds there.

`side` does to the files below one mount what it is asked for, here or on another machine; `measuring` makes changes on
one side and looks at them from the other.
"""
