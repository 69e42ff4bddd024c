from tests.plane.conftest import _forked_data_planes as _forked_data_planes, url as url
