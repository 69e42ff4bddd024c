from .seams import Scope as Scope, check_seams as check_seams, installed_seams as installed_seams
from .versions import NEWEST as NEWEST, check_version as check_version
