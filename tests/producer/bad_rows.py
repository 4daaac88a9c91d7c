"""Lines that are no rows: each with the byte at which that shows, None where nobody says, and a part of the reason."""

BOM = b"\xef\xbb\xbf"

BAD = {
    "malformed": (b'{"id":25 "text":1}', 9, ""),
    "cut": (b'{"id":25,"te', 12, ""),
    "blanks": (b"   ", 0, "nothing but blanks"),
    "tab": (b"\t", 0, "nothing but blanks"),
    "invalid UTF-8": (b'{"id":"\xff"}', 7, "not UTF-8"),
    "UTF-16": ('{"id":25}'.encode("utf-16"), 0, "iconv"),
    "BOM within the file": (BOM + b'{"id":25}', 0, "byte order mark"),
    "CR only": (b'{"id":25}\r{"id":26}', 10, "carriage returns"),
    "lone surrogate": (b'{"id":"\\ud800"}', None, "surrogate"),
    "raw NUL": (b'{"id":"\0"}', 7, "control character"),
    "NaN": (b'{"id":NaN}', 6, "NaN"),
    "Infinity": (b'{"id":-Infinity}', None, "infinities are not JSON"),
    "1e999": (b'{"id":1e999}', 6, ""),
    "integer of 5,000 digits": (b'{"id":' + b"9" * 5000 + b"}", 6, ""),
    "integer past 64 bits": (b'{"id":18446744073709551616}', 6, "64 bits"),
    "two values": (b'{"id":25} {"id":26}', 10, ""),
    "array": (b"[25]", 0, "expected a JSON object, found an array"),
    "number": (b"25", 0, "expected a JSON object"),
    "nesting of 100,000": (b'{"id":' * 100_000 + b"1" + b"}" * 100_000, None, ""),
    "NUL tail": (b'{"id":25}' + b"\0" * 100, 9, "torn by a crash"),
    "too long": (b'{"id":"' + b"x" * 2_000_000 + b'"}', 0, "--max-row-bytes"),
}
