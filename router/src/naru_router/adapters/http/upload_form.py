"""A multipart form with one file in it, read as it comes: fields are kept, the file's bytes are handed on.

Fed by the file endpoint. Holds no more than a field's value and what one piece of the body had of the file.
"""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from naru_proto.errors import InvalidRequest
from naru_router.core.fields import shown

FILE_FIELD = "file"
MAX_FIELDS = 32
MAX_VALUE_BYTES = 4096
MAX_HEADER_BYTES = 4096


class UploadForm:
    """Mutable. Raises InvalidRequest for a form that is none, wherever it finds out."""

    def __init__(self, content_type: bytes | None) -> None:
        """`content_type`: of the request."""
        media_type, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if media_type != b"multipart/form-data" or not boundary:
            given = (content_type or b"").decode("latin-1")[:100]
            raise InvalidRequest(f"the content type is {given!r}; send multipart/form-data with a boundary")
        self.fields: dict[str, str] = {}
        """Of the form, but for the file."""
        self.filename: str | None = None
        """None: the file has not come."""
        self.is_complete = False
        """The form's end has come."""
        self._num_parts = 0
        self._name = ""
        self._is_file = False
        self._header = b""
        self._header_value = b""
        self._headers: dict[bytes, bytes] = {}
        self._value = bytearray()
        self._file_pieces: list[bytes] = []
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begins,
                    "on_header_field": self._header_name_comes,
                    "on_header_value": self._header_value_comes,
                    "on_header_end": self._header_ends,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data_comes,
                    "on_part_end": self._part_ends,
                    "on_end": self._form_ends,
                },
                max_header_size=MAX_HEADER_BYTES,
            )
        except FormParserError as exc:
            raise InvalidRequest(f"the form's boundary cannot be used: {exc}") from exc

    def feed(self, data: bytes) -> bytes:
        """Reads on; what of the file was in it."""
        try:
            self._parser.write(data)
        except FormParserError as exc:
            raise InvalidRequest(f"the body is no multipart form: {exc}") from exc
        found = b"".join(self._file_pieces)
        self._file_pieces.clear()
        return found

    def _part_begins(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS:
            raise InvalidRequest(f"the form has more than {MAX_FIELDS} fields; send purpose and file")
        self._headers, self._value = {}, bytearray()

    def _header_name_comes(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value_comes(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_ends(self) -> None:
        self._headers[self._header.lower()] = self._header_value
        self._header = self._header_value = b""

    def _headers_end(self) -> None:
        disposition, options = parse_options_header(self._headers.get(b"content-disposition"))
        if disposition != b"form-data" or b"name" not in options:
            raise InvalidRequest("a part of the form has no name; send purpose and file")
        self._name = options[b"name"].decode("utf-8", "replace")
        self._is_file = self._name == FILE_FIELD
        if self._is_file:
            if self.filename is not None:
                raise InvalidRequest("the form has two files; send one", param=FILE_FIELD)
            self.filename = options.get(b"filename", b"file").decode("utf-8", "replace")

    def _data_comes(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._file_pieces.append(data[start:end])
            return
        if len(self._value) + end - start > MAX_VALUE_BYTES:
            raise InvalidRequest(f"the field {shown(self._name)} is longer than {MAX_VALUE_BYTES} bytes")
        self._value += data[start:end]

    def _part_ends(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _form_ends(self) -> None:
        self.is_complete = True
