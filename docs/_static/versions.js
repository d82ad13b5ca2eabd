// Folders of published versions beside this one, newest first; scripts/versions.py writes them into each.
"use strict";

const versions = [];
