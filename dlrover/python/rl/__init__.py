# SPDX-License-Identifier: Apache-2.0

from dlrover.python.rl.common.moved import name_the_places

name_the_places()
